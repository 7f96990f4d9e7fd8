"""`drover worker`: flags and environment -> Config -> devices, cache, port, service until told to stop.

The only place of the worker that reads the environment, and the only one that puts its parts together. numpy and numba
are imported inside functions: NUMBA_CACHE_DIR must be set before numba is.
"""

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import structlog
import typer
from typer.core import TyperCommand

from drover import logs
from drover.errors import DroverError
from drover.rpc.version_names import BRIEF, NAMES
from drover.sizes import format_size, parse_size
from drover.worker import machine
from drover.worker.limits import FRAME_SECONDS, GENEROUS, GRACE, MAX_CLIENTS, MAX_GRAPHS, Limits

if TYPE_CHECKING:
    from drover.rpc.versions import Version
    from drover.worker.devices.cpu.instructions import Level
    from drover.worker.devices.offer import Offer
    from drover.worker.memory import SharedDevice
    from drover.worker.status import Status
    from drover.worker.store import Store

DEFAULT_PORT = 50052

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Config:
    """All that flags and environment say."""

    host: str
    port: int
    devices: tuple[str, ...]
    """Their names; none is whatever accelerators there are, or else the CPU."""
    with_cpu: bool
    threads: int
    memory: "tuple[Offer, ...]"
    """What each device offers, or all of them alike."""
    weights: Path | None
    """Folder of the weight cache, if there is to be one."""
    weights_limit: int | None
    """Most bytes to keep there; None is a share of the free room."""
    kernels: Path
    """Where compiled kernels are kept, below a folder for each version of them."""
    level: "Level | None"
    """Of instructions that kernels may use; None is whatever the processor has."""
    max_clients: int
    limits: Limits
    idle_timeout: float | None
    frame_timeout: float
    http: int | None
    """Port of the status, if there is to be one; 0 is any free one."""
    grace: float
    """Seconds that running requests may take to end once we are told to stop."""
    versions: "tuple[Version, Version | None]"
    """Of the protocol: the one we speak, and the one we speak to clients that greet otherwise."""
    trace: bool
    """Whether to log a line a command."""
    profile: bool
    """Whether to time every node and print where the time of a client went."""


def worker(
    host: Annotated[str, typer.Option("--host", "-H", help="IPv4 address or name to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="0 is any free port.")] = DEFAULT_PORT,
    device: Annotated[
        str, typer.Option("--device", "-d", help="Devices, e.g. CUDA0,CPU; by default every CUDA device, or else CPU.")
    ] = "",
    cpu: Annotated[bool, typer.Option("--cpu", help="The CPU too, behind the other devices.")] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", min=1, help="Threads; by default all cores we may use.")
    ] = None,
    cpu_level: Annotated[
        str | None, typer.Option("--cpu-level", help="Instructions to compile for: generic, avx2, avx512 or amx.")
    ] = None,
    cache: Annotated[bool, typer.Option("--cache", "-c", help="Keep weights on disk, where llama.cpp does.")] = False,
    cache_dir: Annotated[
        Path | None, typer.Option("--cache-dir", help="Keep weights and compiled kernels in this folder.")
    ] = None,
    cache_size: Annotated[
        str | None,
        typer.Option(
            "--cache-size", help="Most bytes of weights to keep, e.g. 50GiB; by default 80 % of the free room."
        ),
    ] = None,
    cache_limit: Annotated[str | None, typer.Option("--cache-limit", hidden=True)] = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", help="Memory to offer of each device: 8GiB, 80%, or one for each: 8GiB,80%."),
    ] = None,
    mem: Annotated[
        int | None, typer.Option("--mem", "-m", min=1, help="The same in MiB, as older servers have it.")
    ] = None,
    max_clients: Annotated[
        int, typer.Option("--max-clients", min=1, help="Clients at a time; more are turned away.")
    ] = MAX_CLIENTS,
    max_client_memory: Annotated[
        str | None, typer.Option("--max-client-memory", help="Most bytes of buffers for one client, e.g. 8GiB.")
    ] = None,
    max_client_graphs: Annotated[
        int,
        typer.Option("--max-client-graphs", min=1, max=MAX_GRAPHS, help="Graphs to keep for one client on a device."),
    ] = MAX_GRAPHS,
    max_graph_nodes: Annotated[
        int, typer.Option("--max-graph-nodes", min=1, help="Most nodes of a graph.")
    ] = GENEROUS.nodes,
    max_graph_tensors: Annotated[
        int, typer.Option("--max-graph-tensors", min=1, help="Most tensors of a graph.")
    ] = GENEROUS.tensors,
    max_payload: Annotated[
        str | None, typer.Option("--max-payload", help="Most bytes of data or graph in one command; by default 64GiB.")
    ] = None,
    idle_timeout: Annotated[
        float | None, typer.Option("--idle-timeout", min=1, help="Drop clients silent for so many seconds.")
    ] = None,
    frame_timeout: Annotated[
        float, typer.Option("--frame-timeout", min=1, help="Drop clients that stall so many seconds within a frame.")
    ] = FRAME_SECONDS,
    http: Annotated[
        int | None,
        typer.Option("--http", min=0, max=65535, help="Port for /healthz, /readyz, /metrics, /state; 0 is any."),
    ] = None,
    grace: Annotated[
        float, typer.Option("--grace", min=0, help="Seconds that running graphs may take to end at SIGTERM.")
    ] = GRACE,
    protocol: Annotated[
        str, typer.Option("--protocol", help=f"Version of ggml RPC to speak: {', '.join(NAMES)}.")
    ] = "8.0",
    also: Annotated[
        str | None,
        typer.Option(
            "--also", help=f"Serve clients of this older version too, on the same port: {' or '.join(BRIEF)}."
        ),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="When a client goes, print where the time of its graphs went.")
    ] = False,
    log_format: Annotated[Literal["console", "json"], typer.Option("--log-format", help="How to log.")] = "console",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details.")] = False,
) -> None:
    """Offer this machine's devices to llama.cpp and Drover over ggml RPC."""
    from drover.rpc import versions
    from drover.worker import kernels

    logs.configure(log_format, verbose)
    names = tuple(name for name in device.replace("/", ",").replace(" ", "").split(",") if name)
    home = _cache_home(os.environ)
    config = Config(
        host=host,
        port=port,
        devices=names,
        with_cpu=cpu,
        threads=threads or machine.usable_cores(),
        memory=_offers(memory, mem),
        weights=weights_folder(cache_dir) if cache or cache_dir else None,
        weights_limit=_size(cache_size or cache_limit, "--cache-size"),
        kernels=cache_dir or home / "drover",
        level=_level(cpu_level),
        max_clients=max_clients,
        limits=Limits(
            memory=_size(max_client_memory, "--max-client-memory"),
            graphs=max_client_graphs,
            nodes=max_graph_nodes,
            tensors=max_graph_tensors,
            payload=_size(max_payload, "--max-payload") or GENEROUS.payload,
        ),
        idle_timeout=idle_timeout,
        frame_timeout=frame_timeout,
        http=http,
        grace=grace,
        versions=versions.pair(protocol, also),
        trace="GGML_RPC_DEBUG" in os.environ,
        profile=profile,
    )
    with ExitStack() as stack:
        kernels.keep(config.kernels, stack, config.level)
        serve(config)


def serve(config: Config) -> None:
    """Reserve the addresses, open devices and cache, open the port, serve until SIGINT or SIGTERM."""
    from drover.worker import banner
    from drover.worker.server import Server, bind
    from drover.worker.status import Status
    from drover.worker.tally import Tally

    tally = Tally()
    status = Status(tally, config.versions)
    with bind(config.host, config.port) as listener, _status_opened(config, status):
        signal.signal(signal.SIGTERM, _leave)
        banner.warn_of_strangers(config.host)
        with banner.progress("compiling kernels; they are kept for the next start"):
            shared = _open_devices(config)
            store = _open_store(config)
        server = Server(
            shared,
            store,
            max_clients=config.max_clients,
            limits=config.limits,
            idle_timeout=config.idle_timeout,
            frame_timeout=config.frame_timeout,
            grace=config.grace,
            trace=config.trace,
            ceilings=[found for each in shared for found in each.device.limits()] if config.profile else None,
            tally=tally,
            versions=config.versions,
        )

        def stop(_number: int, _frame: FrameType | None) -> None:
            status.stopping()
            server.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        server.open(listener)
        status.opened(shared, server, store)
        banner.offer(config.versions, config.host, listener.getsockname()[1], shared, store)
        server.serve(listener)
    log.info("worker stopped")
    if not server.clients:  # else one still computes: its device must not go away under it
        for each in shared:
            each.device.close()


def _status_opened(config: Config, status: "Status") -> AbstractContextManager[object]:
    if config.http is None:
        return nullcontext()
    from drover.worker import status_server

    return status_server.opened(config.host, config.http, status)


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    """SIGTERM before anybody is served: at once, for a compiler that is unwound calls that an error of its own."""
    os._exit(0)


def _open_devices(config: Config) -> "list[SharedDevice]":
    from drover.worker import devices, kernels
    from drover.worker.memory import SharedDevice

    places = devices.choose(config.devices, config.with_cpu)
    if not config.devices:
        for kind in devices.beyond_us():
            log.warning("accelerators are left alone", kind=kind, why="this build of the worker cannot compute on them")
    if len(config.memory) not in (1, len(places)):
        raise DroverError(f"--memory has {len(config.memory)} amounts for {len(places)} devices; give one, or as many")
    offers = config.memory * (len(places) // len(config.memory))
    host = machine.available_memory() // max(1, sum(place.on_host for place in places))
    if any(place.name == "CPU" for place in places):
        kernels.compile_apart()
    return [
        SharedDevice(place.open(devices.Wanted(place.number, config.threads, offer, host)))
        for place, offer in zip(places, offers, strict=True)
    ]


def _open_store(config: Config) -> "Store | None":
    if config.weights is None:
        return None
    from drover.hashing import fnv1a
    from drover.worker.store import Store

    try:
        store = Store(config.weights, config.weights_limit)
        store.trim(store.limit)
    except DroverError as error:
        log.warning("serving without a weight cache", why=str(error))
        return None
    fnv1a(b"compile me before the first client waits")
    return store


def _cache_home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/"), ".cache"))


def weights_folder(cache_dir: Path | None, environ: Mapping[str, str] = os.environ) -> Path:
    """The weight cache in a folder of the user's, else where llama.cpp keeps its own (docs/protocol.md section 4.1)."""
    home = Path(environ["LLAMA_CACHE"]) if environ.get("LLAMA_CACHE") else _cache_home(environ) / "llama.cpp"
    return (cache_dir or home) / "rpc"


def _offers(memory: str | None, mem: int | None) -> "tuple[Offer, ...]":
    from drover.worker.devices.offer import Offer, parse_offer

    if memory is not None and mem is not None:
        raise DroverError("--memory and --mem are two spellings of one option; give one of them")
    if mem is not None:
        return (Offer(mem << 20),)
    return (Offer(),) if memory is None else tuple(parse_offer(word) for word in memory.split(","))


def _level(text: str | None) -> "Level | None":
    from drover.worker.devices.cpu.instructions import Level

    if text is None or text in tuple(Level):
        return None if text is None else Level(text)
    raise DroverError(f"--cpu-level {text}: there are {', '.join(Level)}")


def _size(text: str | None, option: str) -> int | None:
    if text is None:
        return None
    size = parse_size(text)
    if size <= 0:
        raise DroverError(f"{option} {text}: nothing, write e.g. {format_size(8 << 30)}")
    return size


class _Command(TyperCommand):
    """The command, and a spelling that no option can have: click would read -cpu as -c -p u."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line."""
        return super().parse_args(ctx, ["--cpu" if word == "-cpu" else word for word in args])


def add_to(app: typer.Typer) -> None:
    """Make `worker` a command of an application."""
    app.command(cls=_Command)(worker)


def main() -> int:
    """The command by itself: `python -m drover.worker`; returns the exit status."""
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    add_to(app)
    try:
        app()
    except DroverError as error:
        print(f"drover worker: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

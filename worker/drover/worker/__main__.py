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
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import structlog
import typer

from drover import logs
from drover.errors import DroverError
from drover.sizes import format_size, parse_size
from drover.worker import kernels, machine
from drover.worker.limits import FRAME_SECONDS, GENEROUS, GRACE, MAX_CLIENTS, MAX_GRAPHS, Limits

if TYPE_CHECKING:
    from drover.worker.memory import SharedDevice
    from drover.worker.status import Status
    from drover.worker.store import Store

DEFAULT_PORT = 50052
_SPARE = 512 << 20
"""Memory left to everything else when we offer what is available."""
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Config:
    """All that flags and environment say."""

    host: str
    port: int
    devices: tuple[str, ...]
    threads: int
    memory: int
    """Bytes each device offers."""
    weights: Path | None
    """Folder of the weight cache, if there is to be one."""
    weights_limit: int | None
    kernels: Path
    """Where compiled kernels are kept, below a folder for each version of them."""
    max_clients: int
    limits: Limits
    idle_timeout: float | None
    frame_timeout: float
    http: int | None
    """Port of the status, if there is to be one; 0 is any free one."""
    grace: float
    """Seconds that running requests may take to end once we are told to stop."""
    trace: bool
    """Whether to log a line a command."""


def worker(
    host: Annotated[str, typer.Option("--host", "-H", help="IPv4 address or name to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="0 is any free port.")] = DEFAULT_PORT,
    device: Annotated[str, typer.Option("--device", "-d", help="Devices, e.g. cpu or cpu,reference.")] = "cpu",
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", min=1, help="Threads; by default all cores we may use.")
    ] = None,
    cache: Annotated[bool, typer.Option("--cache", "-c", help="Keep weights on disk, where llama.cpp does.")] = False,
    cache_dir: Annotated[
        Path | None, typer.Option("--cache-dir", help="Keep weights and compiled kernels in this folder.")
    ] = None,
    cache_limit: Annotated[
        str | None, typer.Option("--cache-limit", help="Most bytes of weights to keep, e.g. 20GiB.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Memory to offer, e.g. 8GiB; by default what is available.")
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
    log_format: Annotated[Literal["console", "json"], typer.Option("--log-format", help="How to log.")] = "console",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details.")] = False,
) -> None:
    """Offer this machine's devices to llama.cpp and Drover over ggml RPC."""
    logs.configure(log_format, verbose)
    names = tuple(name for name in device.replace("/", ",").replace(" ", "").split(",") if name)
    home = _cache_home(os.environ)
    weights = cache_dir or (_weights_home(os.environ, home) if cache else None)
    config = Config(
        host=host,
        port=port,
        devices=names or ("cpu",),
        threads=threads or machine.usable_cores(),
        memory=_size(memory, "--memory") or _offer(len(names) or 1),
        weights=None if weights is None else weights / "rpc",
        weights_limit=_size(cache_limit, "--cache-limit"),
        kernels=cache_dir or home / "drover",
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
        trace="GGML_RPC_DEBUG" in os.environ,
    )
    with ExitStack() as stack:
        kernels.keep(config.kernels, stack)
        serve(config)


def serve(config: Config) -> None:
    """Reserve the addresses, open devices and cache, open the port, serve until SIGINT or SIGTERM."""
    from drover.worker import banner
    from drover.worker.server import Server, bind
    from drover.worker.status import Status
    from drover.worker.tally import Tally

    tally = Tally()
    status = Status(tally)
    with bind(config.host, config.port) as listener, _status_opened(config, status):
        signal.signal(signal.SIGTERM, _leave)
        banner.warn_of_strangers(config.host)
        with banner.progress("compiling kernels; they are kept for the next start"):
            devices = _open_devices(config)
            store = _open_store(config)
        server = Server(
            devices,
            store,
            max_clients=config.max_clients,
            limits=config.limits,
            idle_timeout=config.idle_timeout,
            frame_timeout=config.frame_timeout,
            grace=config.grace,
            trace=config.trace,
            tally=tally,
        )

        def stop(_number: int, _frame: FrameType | None) -> None:
            status.stopping()
            server.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        server.open(listener)
        status.opened(devices, server, store)
        banner.offer(config.host, listener.getsockname()[1], devices, store)
        server.serve(listener)
    log.info("worker stopped")
    if not server.clients:  # else one still computes: its device must not go away under it
        for shared in devices:
            shared.device.close()


def _status_opened(config: Config, status: "Status") -> AbstractContextManager[object]:
    if config.http is None:
        return nullcontext()
    from drover.worker import status_server

    return status_server.opened(config.host, config.http, status)


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    """SIGTERM before anybody is served: at once, for a compiler that is unwound calls that an error of its own."""
    os._exit(0)


def _open_devices(config: Config) -> "list[SharedDevice]":
    from drover.worker.devices import DEVICES, open_device
    from drover.worker.memory import SharedDevice

    unknown = [name for name in config.devices if name.upper() not in DEVICES]
    names = unknown or config.devices  # a wrong name is said before any kernel is compiled
    if not unknown and "CPU" in map(str.upper, names):
        kernels.compile_apart()
    return [SharedDevice(open_device(name, config.threads, config.memory)) for name in names]


def _open_store(config: Config) -> "Store | None":
    if config.weights is None:
        return None
    from drover.hashing import fnv1a
    from drover.worker.store import Store

    try:
        store = Store(config.weights, config.weights_limit)
    except DroverError as error:
        log.warning("serving without a weight cache", why=str(error))
        return None
    fnv1a(b"compile me before the first client waits")
    return store


def _cache_home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/"), ".cache"))


def _weights_home(environ: Mapping[str, str], cache_home: Path) -> Path:
    """Where llama.cpp keeps its own (docs/protocol.md section 4.1)."""
    return Path(environ["LLAMA_CACHE"]) if environ.get("LLAMA_CACHE") else cache_home / "llama.cpp"


def _offer(devices: int) -> int:
    available = machine.available_memory()
    return max(available - _SPARE, available // 2) // devices


def _size(text: str | None, option: str) -> int | None:
    if text is None:
        return None
    size = parse_size(text)
    if size <= 0:
        raise DroverError(f"{option} {text}: nothing, write e.g. {format_size(8 << 30)}")
    return size


def main() -> int:
    """The command by itself: `python -m drover.worker`; returns the exit status."""
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command()(worker)
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

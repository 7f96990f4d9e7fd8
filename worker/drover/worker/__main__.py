"""`drover worker`: flags and environment -> Config -> devices, cache, port, service until told to stop.

The only place of the worker that reads the environment, and the only one that puts its parts together. numpy and numba
are imported inside functions: NUMBA_CACHE_DIR must be set before numba is.
"""

import ipaddress
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import structlog
import typer

from drover import logs
from drover.errors import DroverError
from drover.sizes import format_size, parse_size
from drover.worker import machine

if TYPE_CHECKING:
    from socket import socket

    from drover.worker.memory import SharedDevice
    from drover.worker.status import Status
    from drover.worker.store import Store

DEFAULT_PORT = 50052
DEFAULT_GRACE = 30.0
SHIPPED = Path(sys.prefix, "share", "drover")
"""Where an image keeps the kernels that were compiled when it was built."""
_SPARE = 512 << 20
"""Memory left to everything else when we offer what is available."""
_WARNING = """\
!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!
WARNING: listening on {host}, not only on this machine.
         The ggml RPC protocol has neither authentication nor encryption: whoever
         reaches the port may use this worker and read what it computes.
         Keep the port on a network that you trust.
!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!
"""

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
    """Most bytes to keep there; None is a share of the free room."""
    kernels: Path
    """Where compiled kernels are kept, below a folder for each version of them."""
    idle_timeout: float | None
    http: int | None
    """Port of the status, if there is to be one; 0 is any free one."""
    grace: float
    """Seconds that running requests may take to end once we are told to stop."""


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
    cache_size: Annotated[
        str | None,
        typer.Option(
            "--cache-size", help="Most bytes of weights to keep, e.g. 50GiB; by default 80 % of the free room."
        ),
    ] = None,
    cache_limit: Annotated[str | None, typer.Option("--cache-limit", hidden=True)] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Memory to offer, e.g. 8GiB; by default what is available.")
    ] = None,
    idle_timeout: Annotated[
        float | None, typer.Option("--idle-timeout", min=1, help="Drop clients silent for so many seconds.")
    ] = None,
    http: Annotated[
        int | None,
        typer.Option("--http", min=0, max=65535, help="Port for /healthz, /readyz, /metrics, /state; 0 is any."),
    ] = None,
    grace: Annotated[
        float, typer.Option("--grace", min=0, help="Seconds that running graphs may take to end at SIGTERM.")
    ] = DEFAULT_GRACE,
    log_format: Annotated[Literal["console", "json"], typer.Option("--log-format", help="How to log.")] = "console",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details.")] = False,
) -> None:
    """Offer this machine's devices to llama.cpp and Drover over ggml RPC."""
    logs.configure(log_format, verbose)
    names = tuple(name for name in device.replace("/", ",").replace(" ", "").split(",") if name)
    home = _cache_home(os.environ)
    config = Config(
        host=host,
        port=port,
        devices=names or ("cpu",),
        threads=threads or machine.usable_cores(),
        memory=_size(memory, "--memory") or _offer(len(names) or 1),
        weights=weights_folder(cache_dir) if cache or cache_dir else None,
        weights_limit=_size(cache_size or cache_limit, "--cache-size"),
        kernels=cache_dir or home / "drover",
        idle_timeout=idle_timeout,
        http=http,
        grace=grace,
    )
    with ExitStack() as stack:
        _keep_kernels(config.kernels, stack)
        serve(config)


def serve(config: Config) -> None:
    """Reserve the addresses, open devices and cache, open the port, serve until SIGINT or SIGTERM."""
    from drover.worker.server import Server, bind
    from drover.worker.status import Status
    from drover.worker.tally import Tally

    tally = Tally()
    status = Status(tally)
    with bind(config.host, config.port) as listener, _status_opened(config, status):
        signal.signal(signal.SIGTERM, _leave)
        _warn_of_strangers(config.host)
        with _progress("compiling kernels; they are kept for the next start"):
            devices = _open_devices(config)
            store = _open_store(config)
        server = Server(devices, store, idle_timeout=config.idle_timeout, grace=config.grace, tally=tally)

        def stop(_number: int, _frame: FrameType | None) -> None:
            status.stopping()
            server.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        server.open(listener)
        status.opened(devices, server, store)
        _banner(config.host, listener, devices, store)
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
    return [SharedDevice(open_device(name, config.threads, config.memory)) for name in names]


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


def _banner(host: str, listener: "socket", devices: "list[SharedDevice]", store: "Store | None") -> None:
    """What we offer, in the words of the stock server, for people and for whoever waits for the port."""
    lines = [
        "Starting RPC server v8.0.0",
        f"  endpoint       : {host}:{listener.getsockname()[1]}",
        f"  local cache    : {store.folder if store else 'n/a'}",
        "Devices:",
    ]
    for shared in devices:
        free, total = shared.device.memory()
        lines.append(f"  {shared.device.name}: {shared.device.description} ({total >> 20} MiB, {free >> 20} MiB free)")
    print(*lines, "  transport      : TCP", sep="\n", flush=True)


def _warn_of_strangers(host: str) -> None:
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        print(_WARNING.format(host=host), file=sys.stderr, flush=True)


def _keep_kernels(root: Path, stack: ExitStack) -> None:
    """Tell numba where to keep compiled kernels, unless the user has; a folder we cannot use costs a warning."""
    from drover.worker.devices.cpu.kernel_cache import cache_directory

    if os.environ.get("NUMBA_CACHE_DIR"):
        return
    folder = cache_directory(root)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _copy_shipped(folder)
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        log.warning("compiled kernels cannot be kept", folder=str(folder), why=error.strerror or str(error))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="drover-kernels-"))) / folder.name
        _copy_shipped(folder)
    os.environ["NUMBA_CACHE_DIR"] = str(folder)


def _copy_shipped(folder: Path) -> None:
    """Start from the kernels that an image brings; numba uses those for this CPU, and adds its own on another."""
    shipped = SHIPPED / "kernels" / folder.name
    if folder.exists() or not shipped.is_dir():
        return
    with suppress(OSError), tempfile.TemporaryDirectory(dir=folder.parent, prefix="shipped-") as partial:
        whole = Path(partial, folder.name)
        shutil.copytree(shipped, whole, ignore=shutil.ignore_patterns("complete", "lock"))
        whole.rename(folder)


@contextmanager
def _progress(what: str) -> Iterator[None]:
    """Say on standard error that something takes long, once it does, and how long it took."""
    done = threading.Event()
    start = time.monotonic()
    interactive = sys.stderr.isatty()

    def show() -> None:
        wait = 2.0
        while not done.wait(wait):
            wait = 1.0 if interactive else 15.0
            line = f"{what} ({time.monotonic() - start:.0f} s)"
            print(f"\r{line}" if interactive else line, end="" if interactive else "\n", file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if interactive and time.monotonic() - start > 2:
            print(file=sys.stderr, flush=True)


def _cache_home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/"), ".cache"))


def weights_folder(cache_dir: Path | None, environ: Mapping[str, str] = os.environ) -> Path:
    """The weight cache in a folder of the user's, else where llama.cpp keeps its own (docs/protocol.md section 4.1)."""
    home = Path(environ["LLAMA_CACHE"]) if environ.get("LLAMA_CACHE") else _cache_home(environ) / "llama.cpp"
    return (cache_dir or home) / "rpc"


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

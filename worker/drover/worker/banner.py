"""What a worker prints for people, and for whoever waits for its port; everything else it says is logged."""

import ipaddress
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from drover.rpc.versions import Version
from drover.worker.memory import SharedDevice
from drover.worker.store import Store

_WARNING = """\
!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!
WARNING: listening on {host}, not only on this machine.
         The ggml RPC protocol has neither authentication nor encryption: whoever
         reaches the port may use this worker and read what it computes.
         Keep the port on a network that you trust.
!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!
"""


def offer(
    versions: tuple[Version, Version | None], host: str, port: int, devices: Sequence[SharedDevice], store: Store | None
) -> None:
    """What we offer, in the words of the stock server, for people and for whoever waits for the port."""
    lines = [
        f"Starting RPC server v{versions[0]}",
        *(f"  also speaks    : v{version}" for version in versions[1:] if version),
        f"  endpoint       : {host}:{port}",
        f"  local cache    : {store.folder if store else 'n/a'}",
        "Devices:",
    ]
    for shared in devices:
        free, total = shared.device.memory()
        lines.append(f"  {shared.device.name}: {shared.device.description} ({total >> 20} MiB, {free >> 20} MiB free)")
    print(*lines, "  transport      : TCP", sep="\n", flush=True)


def warn_of_strangers(host: str) -> None:
    """Say who can reach us, if that is not only this machine."""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        print(_WARNING.format(host=host), file=sys.stderr, flush=True)


@contextmanager
def progress(what: str) -> Iterator[None]:
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

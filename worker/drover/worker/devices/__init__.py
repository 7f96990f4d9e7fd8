"""The devices a worker can own, by name; a device's package is imported when it is opened, and not before.

Names are llama.cpp's: CPU, and CUDA0, CUDA1 where a machine can have several of a kind. Reading order: `device` (what
a device is), `offer`, `discovery`, `host`, `reference`, `cpu`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drover.errors import DeviceError
from drover.worker.devices.device import Device
from drover.worker.devices.discovery import cuda_devices
from drover.worker.devices.offer import Offer

RESERVE = 512 << 20
"""Memory of the host left to everything else when we offer what is free."""
_NAME = re.compile(r"([A-Z]+):?([0-9]*)")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a device is opened with: its number among its kind, threads to compute with, memory to offer of it."""

    number: int
    threads: int
    offer: Offer
    host: int
    """Bytes of the host's memory that are free for this device, should it be one that computes there."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A row of the registry: how many there are on this machine, and how one is opened, ready to compute."""

    count: Callable[[], int]
    open: Callable[[Wanted], Device] | None
    """None is: this build cannot."""
    on_host: bool
    """Whether it computes in the host's memory; there is one of these, and its name has no number."""


@dataclass(frozen=True, slots=True)
class Place:
    """A device that can be opened."""

    name: str
    number: int
    open: Callable[[Wanted], Device]
    on_host: bool


def choose(asked: Sequence[str], with_cpu: bool = False) -> list[Place]:
    """The devices of these names, in any case; of no name, every accelerator there is, or else the CPU.

    `with_cpu` puts the CPU behind them. DeviceError says what is unknown, missing or not in this build.
    """
    places = [_find(name) for name in asked] if asked else accelerators() or [_find("CPU")]
    if with_cpu and not any(place.name == "CPU" for place in places):
        places.append(_find("CPU"))
    return places


def accelerators() -> list[Place]:
    """Every device that this build can open and that has memory of its own."""
    return [
        Place(f"{word}{number}", number, kind.open, on_host=False)
        for word, kind in DEVICES.items()
        if not kind.on_host and kind.open
        for number in range(kind.count())
    ]


def beyond_us() -> list[str]:
    """Kinds of accelerators that the machine has and this build cannot open."""
    return [word for word, kind in DEVICES.items() if kind.open is None and kind.count()]


def _find(name: str) -> Place:
    match = _NAME.fullmatch(name.upper())
    kind = DEVICES.get(match[1]) if match else None
    if match is None or kind is None or (kind.on_host and match[2]):
        available = [place.name for place in accelerators()] + [word for word, row in DEVICES.items() if row.on_host]
        raise DeviceError(f"unknown device {name!r}; available: {', '.join(available)}")
    number = int(match[2] or 0)
    full = match[1] if kind.on_host else f"{match[1]}{number}"
    if kind.open is None:
        raise DeviceError(f"{full}: this build of the worker cannot compute on {match[1]}; use --device cpu")
    if not kind.on_host and number >= (count := kind.count()):
        raise DeviceError(f"{full}: the driver shows {count} devices of this kind; see {match[1]}_VISIBLE_DEVICES")
    return Place(full, number, kind.open, kind.on_host)


def _open_cpu(wanted: Wanted) -> Device:
    from drover.worker.devices.cpu.device import CpuDevice

    return CpuDevice(wanted.threads, wanted.offer.of(wanted.host, RESERVE))


def _open_reference(wanted: Wanted) -> Device:
    from drover.worker.devices.reference.device import ReferenceDevice

    return ReferenceDevice(wanted.offer.of(wanted.host, RESERVE))


DEVICES: dict[str, Kind] = {
    "CUDA": Kind(cuda_devices, None, on_host=False),
    "CPU": Kind(lambda: 1, _open_cpu, on_host=True),
    "REFERENCE": Kind(lambda: 1, _open_reference, on_host=True),
}

"""The devices a worker can own, by name; a device's package is imported when it is opened, and not before.

Reading order: `device` (what a device is), `host`, `reference`, `cpu`.
"""

from collections.abc import Callable

from drover.errors import DeviceError
from drover.worker.devices.device import Device

Opener = Callable[[int, int], Device]
"""Threads to compute with and bytes of memory to offer -> a device, ready to compute."""


def open_device(name: str, threads: int, memory: int) -> Device:
    """Open a device by name, in any case; raises DeviceError listing the names there are."""
    opener = DEVICES.get(name.upper())
    if opener is None:
        raise DeviceError(f"unknown device {name!r}; available: {', '.join(DEVICES)}")
    return opener(threads, memory)


def _open_cpu(threads: int, memory: int) -> Device:
    from drover.worker.devices.cpu.device import CpuDevice

    return CpuDevice(threads, memory)


def _open_reference(_threads: int, memory: int) -> Device:
    from drover.worker.devices.reference.device import ReferenceDevice

    return ReferenceDevice(memory)


DEVICES: dict[str, Opener] = {"CPU": _open_cpu, "REFERENCE": _open_reference}

"""Devices that tests need and users do not."""

from typing import Any

from drover.worker.devices.device import Buffer
from drover.worker.devices.host import host
from drover.worker.devices.reference.device import ReferenceDevice


class Unreachable(ReferenceDevice):
    """A device whose memory the host cannot address, as a GPU's."""

    def window(self, buffer: Buffer, offset: int, size: int) -> Any:  # noqa: ARG002  the signature of a device
        """Nothing to see."""
        return None

    def write(self, buffer: Buffer, offset: int, data: memoryview) -> None:
        """Copy bytes in."""
        host(buffer).array.data[offset : offset + len(data)] = data

    def read(self, buffer: Buffer, offset: int, out: memoryview) -> None:
        """Copy bytes out."""
        out[:] = host(buffer).array.data[offset : offset + len(out)]

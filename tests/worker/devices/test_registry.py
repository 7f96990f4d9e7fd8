"""Which devices a name stands for, with accelerators and without; what of their memory is offered."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drover.errors import DeviceError, DroverError
from drover.worker import devices
from drover.worker.devices import Kind, Wanted, accelerators, beyond_us, choose
from drover.worker.devices.discovery import cuda_devices
from drover.worker.devices.offer import Offer, parse_offer
from drover.worker.devices.reference.device import ReferenceDevice

GIB = 1 << 30


def accelerated(wanted: Wanted) -> ReferenceDevice:
    return ReferenceDevice(wanted.offer.of(10 * GIB, 0))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(devices.DEVICES, "CUDA", Kind(lambda: 2, accelerated, on_host=False))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(devices.DEVICES, "CUDA", Kind(lambda: 0, accelerated, on_host=False))


@pytest.fixture
def foreign_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(devices.DEVICES, "CUDA", Kind(lambda: 1, None, on_host=False))


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("asked", "with_cpu", "names"),
    [
        ([], False, "CUDA0 CUDA1"),
        ([], True, "CUDA0 CUDA1 CPU"),
        (["cuda"], False, "CUDA0"),
        (["CUDA1"], True, "CUDA1 CPU"),
        (["cuda:1", "cuda:0"], False, "CUDA1 CUDA0"),
        (["cpu", "cuda0"], True, "CPU CUDA0"),
        (["cpu"], True, "CPU"),
        (["Reference", "Cpu"], False, "REFERENCE CPU"),
    ],
)
def test_names_with_accelerators(asked: Sequence[str], with_cpu: bool, names: str) -> None:
    assert [place.name for place in choose(asked, with_cpu)] == names.split()


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("with_cpu", [False, True])
def test_without_accelerators_it_is_the_cpu(with_cpu: bool) -> None:
    assert [place.name for place in choose([], with_cpu)] == ["CPU"]
    with pytest.raises(DeviceError, match="CUDA0: the driver shows 0 devices of this kind; see CUDA_VISIBLE_DEVICES"):
        choose(["cuda"])


@pytest.mark.usefixtures("foreign_gpu")
def test_accelerators_that_this_build_cannot_open() -> None:
    assert [place.name for place in choose([])] == ["CPU"]
    assert beyond_us() == ["CUDA"]
    assert not accelerators()
    with pytest.raises(DeviceError, match="CUDA0: this build of the worker cannot compute on CUDA; use --device cpu"):
        choose(["cuda"])


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("name", ["tpu", "cpu0", "cpu:1", "", "cuda:x", "0"])
def test_an_unknown_name_lists_the_known(name: str) -> None:
    with pytest.raises(DeviceError, match=f"unknown device '{name}'; available: CUDA0, CUDA1, CPU, REFERENCE"):
        choose([name])


@pytest.mark.usefixtures("two_gpus")
def test_a_number_beyond_what_the_driver_shows() -> None:
    with pytest.raises(DeviceError, match="CUDA2: the driver shows 2 devices"):
        choose(["cuda2"])


class Driver:
    """A driver's library in so far as it is asked."""

    def __init__(self, status: int, count: int) -> None:
        self._status, self._count = status, count

    def cuInit(self, _flags: int) -> int:  # noqa: N802  the driver's name
        return self._status

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802  the driver's name
        count._obj.value = self._count
        return 0


@pytest.mark.parametrize(("status", "count"), [(0, 3), (0, 0), (100, 5)])
def test_the_driver_is_asked(status: int, count: int) -> None:
    assert cuda_devices(lambda _: Driver(status, count)) == (0 if status else count)


def test_without_a_driver_there_is_none() -> None:
    assert cuda_devices(lambda _: ctypes.CDLL("/there/is/no/such/library.so")) == 0


def test_nothing_heavy_is_imported_to_look_around(tmp_path: Path) -> None:
    code = "import sys; from drover.worker.devices import choose; choose([]); print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert not {"cupy", "numpy", "numba"} & set(ran.stdout.split())


@pytest.mark.parametrize(
    ("text", "free", "bytes_"),
    [("8GiB", GIB, 8 * GIB), ("1048576", GIB, 1 << 20), ("80%", 10 * GIB, 8 * GIB), ("12.5 %", 8 * GIB, GIB)],
)
def test_an_offer(text: str, free: int, bytes_: int) -> None:
    assert parse_offer(text).of(free, 512 << 20) == bytes_


def test_an_offer_unless_told_leaves_a_reserve() -> None:
    assert Offer().of(4 * GIB, GIB) == 3 * GIB
    assert Offer().of(GIB, GIB) == GIB // 2


@pytest.mark.parametrize("text", ["0", "0%", "101%", "-5%", "%", "lots", "", "8 GB%"])
def test_what_is_no_offer(text: str) -> None:
    with pytest.raises(DroverError, match=r"write e\.g\."):
        parse_offer(text)

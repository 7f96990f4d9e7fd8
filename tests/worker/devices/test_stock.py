"""The reference device against the stock worker: every case both can compute, on the other side of the wire."""

from collections.abc import Iterator

import pytest

from drover.worker.devices.reference.device import ReferenceDevice
from worker.devices import cases
from worker.devices.stock import StockDevice

LOOKED_UP = ("GELU-F", "GELU_QUICK", "GEGLU-F", "GEGLU_QUICK", "CONV_2D-", "CONV_3D-", "CONV_TRANSPOSE_2D")
"""Names in cases that the stock worker computes from tables of, or after rounding to, F16."""
ROUNDED = 1e-3


@pytest.fixture(scope="module")
def stock(stock_workers: list[int]) -> Iterator[StockDevice]:
    device = StockDevice(f"127.0.0.1:{stock_workers[0]}")
    yield device
    device.close()


@pytest.mark.interop
@pytest.mark.parametrize("case", cases.STOCK_CASES, ids=lambda case: case.id)
def test_reference_agrees_with_the_stock_worker(stock: StockDevice, case: cases.Case) -> None:
    allowed = ROUNDED if any(name in case.id for name in LOOKED_UP) else None
    expected = cases.run(ReferenceDevice(1 << 30), case)
    wrong = cases.differences(case, cases.run(stock, case), expected, allowed)
    assert wrong is None, wrong

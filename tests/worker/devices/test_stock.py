"""The reference device against the stock worker: every case both can compute, on the other side of the wire."""

from collections.abc import Iterator

import pytest

from drover.worker.devices.reference.device import ReferenceDevice
from worker.devices import cases
from worker.devices.stock import StockDevice


@pytest.fixture(scope="module")
def stock(stock_workers: list[int]) -> Iterator[StockDevice]:
    device = StockDevice(f"127.0.0.1:{stock_workers[0]}")
    yield device
    device.close()


@pytest.mark.interop
@pytest.mark.parametrize("case", cases.STOCK_CASES, ids=lambda case: case.id)
def test_reference_agrees_with_the_stock_worker(stock: StockDevice, case: cases.Case) -> None:
    allowed = next((most for name, most in cases.LOOKED_UP.items() if name in case.id), None)
    expected = cases.run(ReferenceDevice(1 << 30), case)
    wrong = cases.differences(case, cases.run(stock, case), expected, allowed)
    assert wrong is None, wrong


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.id)
def test_no_tolerance_is_wider_than_the_one_of_llama_cpp(case: cases.Case) -> None:
    assert cases.tolerance(case) <= cases.SUITE_TOLERANCES.get(case.op, cases.SUITE_TOLERANCE)

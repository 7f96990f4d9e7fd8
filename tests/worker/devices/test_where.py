"""docs/conformance.md says where each operation runs, by what becomes of the table of cases on the cpu device."""

import re
from collections import defaultdict
from pathlib import Path

from drover.ggml.ops import METADATA_OPS, Op
from drover.worker.devices.cpu.program import compile_nodes
from drover.worker.devices.device import Node
from drover.worker.devices.reference.device import OPERATIONS, ReferenceDevice
from worker.devices import cases, kernel_cases

PAGE = (Path(__file__).parents[3] / "docs" / "conformance.md").read_text()
PER_TOKEN = (
    "MUL MUL_MAT ADD GET_ROWS SET_ROWS ROPE RMS_NORM GLU SOFT_MAX CONT FLASH_ATTN_EXT ARGSORT MUL_MAT_ID SCALE "
    "UNARY CLAMP SUM_ROWS DIV CONCAT NORM CPY SSM_CONV REPEAT GATED_DELTA_NET SSM_SCAN TOP_K FILL "
    "LIGHTNING_INDEXER SQR DSV4_HC_PRE PAD DSV4_HC_POST DSV4_HC_COMB SQRT SUB ARANGE ROPE_BACK ADD_ID CUMSUM "
    "POOL_2D"
).split()
"""What 131 models of llama.cpp send while they generate (docs/protocol.md section 6.9)."""


def rows() -> list[str]:
    """The table as it ought to be."""
    device = ReferenceDevice(1 << 30)
    kernels: dict[Op, set[str]] = defaultdict(set)
    fallbacks: dict[Op, set[str]] = defaultdict(set)
    for case in (*cases.CASES, *kernel_cases.CASES):
        node = cases.place(device, case).node
        (step,) = compile_nodes([node], threads=1).steps
        (fallbacks if isinstance(step, Node) else kernels)[case.op].add(_type(node))
    found = []
    for op in sorted(OPERATIONS - METADATA_OPS):
        fast, slow = kernels[op], fallbacks[op]
        only = sorted(slow - fast)
        some = f"some shapes of {', '.join(sorted(slow & fast))}" if slow & fast else ""
        where = "cpu" if fast and not slow else "reference" if not fast else "cpu and reference"
        rest = "; ".join(filter(None, (", ".join(only), some))) if fast else ""
        found.append(f"| {op.name} | {where} | {rest or '–'} |")
    return found


def _type(node: Node) -> str:
    """What matters for whether there is a kernel: types that are converted, of keys, or of the first operand."""
    names = [operand.type.name for operand in node.src if operand is not None]
    if node.op in (Op.CPY, Op.SET_ROWS):
        return f"{names[0]} to {node.dst.type.name}"
    return names[1] if node.op == Op.FLASH_ATTN_EXT else (*names, node.dst.type.name)[0]


def test_the_page_says_where_operations_run() -> None:
    (table,) = re.findall(r"^\| operation \| device \|.*\n\| ---.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert table.splitlines() == rows()


def test_what_models_send_per_token_runs_on_the_cpu_device() -> None:
    where = dict(re.findall(r"[^| ][^|]*[^| ]", row)[:2] for row in rows())
    assert {name: where[name] for name in PER_TOKEN if where[name] == "reference"} == {}


def test_every_operation_has_cases() -> None:
    assert {case.op for case in cases.CASES} == OPERATIONS - METADATA_OPS


if __name__ == "__main__":
    print("\n".join(rows()))

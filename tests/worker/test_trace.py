"""What a command's debug line says."""

import pytest

from drover.rpc import messages as m
from drover.worker.trace import Fact, facts
from support.client import Bench

TENSOR = Bench(3, 3 << 40).tensor(4, 2, name="blk.0.attn_q.weight")
PLACE = "blk.0.attn_q.weight F32[4, 2, 1, 1] in buffer 3 at 0x30000000000"


@pytest.mark.parametrize(
    ("request_", "reply", "expected"),
    [
        (m.Hello(), m.HelloReply(), {"answer_major": 8, "answer_minor": 0, "answer_patch": 0, "answer_reserved": 0}),
        (
            m.AllocBuffer(1, 64),
            m.AllocBufferReply(2, 64),
            {"device": 1, "size": 64, "answer_remote_ptr": 2, "answer_remote_size": 64},
        ),
        (
            m.SetTensor(TENSOR, 1, 8, memoryview(bytes(24))),
            None,
            {"tensor": PLACE, "cache_flag": 1, "offset": 8, "data": "24 bytes"},
        ),
        (
            m.GetTensor(TENSOR, 0, 32),
            memoryview(bytes(32)),
            {"tensor": PLACE, "offset": 0, "size": 32, "answer_bytes": 32},
        ),
        (
            m.GetAllocSize(0, TENSOR, (None,) * 10),
            m.GetAllocSizeReply(32),
            {"device": 0, "tensor": PLACE, "answer_alloc_size": 32},
        ),
        (
            m.CommInit(0, 1, 2, 5, b"10.0.0.5".ljust(64, b"\0")),
            m.CommInitReply(0),
            {"device": 0, "rank": 1, "world": 2, "port": 5, "host": "10.0.0.5", "answer_ok": 0},
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_facts(request_: m.Request, reply: m.Reply | memoryview | None, expected: dict[str, Fact]) -> None:
    assert facts(request_, reply) == expected

"""A command and its answer in a few facts, for the line that GGML_RPC_DEBUG asks for. Pure."""

from dataclasses import fields

from drover.ggml.tensor import Tensor
from drover.rpc.messages import Reply, Request

Fact = int | str


def facts(request: Request, reply: Reply | memoryview | None) -> dict[str, Fact]:
    """Every number and tensor of a request, the bytes of what is long, and the answer's numbers behind `answer_`."""
    found = {field.name: fact for field in fields(request) if (fact := _fact(getattr(request, field.name))) is not None}
    if isinstance(reply, memoryview):
        found["answer_bytes"] = len(reply)
    elif reply is not None:
        answers = ((field.name, _fact(getattr(reply, field.name))) for field in fields(reply))
        found |= {f"answer_{name}": fact for name, fact in answers if fact is not None}
    return found


def _fact(value: object) -> Fact | None:
    if isinstance(value, Tensor):
        return f"{value.name} {value.type.name}{list(value.ne)} in buffer {value.buffer} at {value.data:#x}"
    if isinstance(value, memoryview):
        return f"{len(value)} bytes"
    if isinstance(value, bytes):
        return value.rstrip(b"\0").decode(errors="replace") or None
    return value if isinstance(value, int) else None

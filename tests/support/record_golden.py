"""Records tests/rpc/golden anew: frames that the stock client and the stock worker of llama.cpp exchange.

usage: python -m support.record_golden. Three sources: a stock client on one worker, a stock client in tensor-parallel
mode on two, and a client written out by hand here for what llama.cpp rarely sends. Our own codec is not used.
"""

import gzip
import shutil
import socket
import struct
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from support import make_gguf
from support.peer import Peer
from support.processes import free_port
from support.proxy_record import NAMES, UNANSWERED, Conversation, Exchange, Relay

GOLDEN = Path(__file__).parents[1] / "rpc" / "golden"
LARGEST_FRAME = 64 << 10
SHAPE = make_gguf.Shape(layers=1, embd=64, ff=128, heads=4, kv=2, vocab=320, ctx=256)
F32, Q4_0 = 0, 2
NONE, ADD, MUL_MAT = 0, 2, 29
COMPUTE = 16


def main() -> None:
    """Record, choose one exchange per command, and write the files."""
    peer = Peer.find()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        by_hand = _record_by_hand(peer, folder)
        model = _tiny_model(peer, folder)
        client = _record_client(peer, folder, model)
        parallel = _record_tensor_parallel(peer, folder, model)
    _write_exchanges([*client.exchanges(), *parallel, *by_hand.exchanges()])
    _write_conversation("by_hand", by_hand)
    _write_conversation("llama_completion", client)


def _write_exchanges(exchanges: Sequence[Exchange]) -> None:
    """COMMAND.request and COMMAND.reply: the first exchange of small frames, in the order of the sources."""
    for name in NAMES:
        fitting = [e for e in exchanges if e.name == name and len(e.request) <= LARGEST_FRAME]
        answered = [e for e in fitting if e.reply is not None and len(e.reply) <= LARGEST_FRAME]
        chosen = (fitting if name in UNANSWERED else answered)[0]
        (GOLDEN / f"{name}.request").write_bytes(chosen.request)
        if chosen.reply is not None:
            (GOLDEN / f"{name}.reply").write_bytes(chosen.reply)


def _write_conversation(name: str, conversation: Conversation) -> None:
    """NAME.requests.gz and NAME.replies.gz: whole streams of one connection."""
    for kind, frames in (("requests", conversation.requests), ("replies", conversation.replies)):
        (GOLDEN / f"{name}.{kind}.gz").write_bytes(gzip.compress(b"".join(frames), 9, mtime=0))


def _tiny_model(peer: Peer, folder: Path) -> Path:
    source, quantized = folder / "f16.gguf", folder / "q8_0.gguf"
    make_gguf.write(source, SHAPE)
    done = peer.run("llama-quantize", source, quantized, "Q8_0", "1", timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return quantized


def _record_client(peer: Peer, folder: Path, model: Path) -> Conversation:
    """The long connection of llama-completion: weights, warm-up, a prompt and a few tokens."""
    port = free_port()
    with peer.start_worker(folder / "worker.log", port), Relay(port) as relay:
        _complete(peer, model, [relay], "the license", "-n", "4")
    return max(relay.conversations, key=lambda c: len(c.requests))


def _record_tensor_parallel(peer: Peer, folder: Path, model: Path) -> list[Exchange]:
    """Two workers that each hold half of every matrix: the two-dimensional transfers and the communicator."""
    with ExitStack() as stack:
        relays = []
        for index in range(2):
            port = free_port()
            stack.enter_context(peer.start_worker(folder / f"worker{index}.log", port))
            relays.append(stack.enter_context(Relay(port)))
        _complete(peer, model, relays, "the license", "-n", "2", "-sm", "tensor")
    return [e for relay in relays for c in relay.conversations for e in c.exchanges()]


def _complete(peer: Peer, model: Path, relays: Sequence[Relay], prompt: str, *options: str) -> None:
    servers = ",".join(f"127.0.0.1:{relay.port}" for relay in relays)
    placed = ("--rpc", servers, "-ngl", "99", "-fit", "off")
    fixed = ("-c", "256", "-t", "1", "--temp", "0", "-no-cnv", "-np", "1")
    done = peer.run("llama-completion", "-m", model, "-p", prompt, *placed, *fixed, *options, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def _record_by_hand(peer: Peer, folder: Path) -> Conversation:
    """All commands a single connection can carry; every result is exact, so that any right worker gives these bytes."""
    port = free_port()
    with (
        peer.start_worker(folder / "by_hand.log", port),
        Relay(port) as relay,
        socket.create_connection(("127.0.0.1", relay.port)) as link,
    ):
        _every_command(_Client(link))
    (conversation,) = relay.conversations
    return conversation


def _every_command(ask: "_Client") -> None:
    ask("HELLO", bytes(24))
    ask("DEVICE_COUNT")
    for name in ("GET_DEVICE_MEMORY", "GET_ALIGNMENT", "GET_MAX_SIZE"):
        ask(name, _u32(0))
    handle, size = struct.unpack("<QQ", ask("ALLOC_BUFFER", _u32(0) + _u64(4096)))
    assert size == 4096
    spare, _ = struct.unpack("<QQ", ask("ALLOC_BUFFER", _u32(0) + _u64(64)))
    (base,) = struct.unpack("<Q", ask("BUFFER_GET_BASE", _u64(handle)))

    def at(number: int, offset: int, ne: Sequence[int], **rest: int | Sequence[int] | str) -> bytes:
        return _tensor(number, handle, base + offset, ne, **rest)  # type: ignore[arg-type]

    a, b = at(1, 0, (4, 3), name="a"), at(2, 256, (4, 3), name="b")
    both = at(3, 512, (4, 3), op=ADD, flags=COMPUTE, src=(1, 2), name="sum")
    product = at(4, 1024, (3, 3), op=MUL_MAT, flags=COMPUTE, src=(1, 3), name="product")
    ask("BUFFER_CLEAR", _u64(handle) + b"\x5a")
    ask("GET_TENSOR", a + _u64(8) + _u64(16))
    ask("SET_TENSOR", a + b"\0" + _u64(0) + struct.pack("<12f", *range(12)))
    ask("GET_TENSOR", a + _u64(0) + _u64(48))
    ask("MEMSET_TENSOR", b + _u64(0) + _u64(48) + b"\0")
    ask("SET_TENSOR", b + b"\1" + _u64(16) + struct.pack("<4f", 1, 2, 3, 4))
    ask("GET_TENSOR", b + _u64(0) + _u64(48))
    ask("SET_TENSOR_2D", b + _u64(4) + _u64(8) + _u64(3) + _u64(16) + struct.pack("<6f", *range(50, 56)))
    ask("GET_TENSOR_2D", b + _u64(0) + _u64(12) + _u64(3) + _u64(16))
    ask("SET_TENSOR_HASH", a + _u64(0) + _u64(0x0123456789ABCDEF))
    ask("COPY_TENSOR", a + at(5, 1536, (4, 3), name="copy"))
    ask("GET_TENSOR", at(5, 1536, (4, 3), name="copy") + _u64(0) + _u64(48))
    ask("INIT_TENSOR", _tensor(6, handle, base + 2048, (32, 2), type_=Q4_0, nb=(18, 18, 36, 36), name="q"))
    ask("GET_ALLOC_SIZE", _u32(0) + product + a + both + bytes(8 * 296))
    nodes = _u32(2) + _u64(3) + _u64(4)
    ask("GRAPH_COMPUTE", _u32(0) + _u64(7) + nodes + _u32(4) + a + b + both + product)
    ask("GET_TENSOR", both + _u64(0) + _u64(48))
    ask("GET_TENSOR", product + _u64(0) + _u64(36))
    ask("SET_TENSOR", b + b"\0" + _u64(0) + struct.pack("<12f", *range(12, 0, -1)))
    ask("GRAPH_RECOMPUTE", _u32(0) + _u64(7))
    ask("GET_TENSOR", product + _u64(0) + _u64(36))
    ask("COMM_INIT", _u32(0) + _u32(0) + _u32(3) + _u32(1) + bytes(64))
    ask("COMM_FREE", _u32(0))
    ask("FREE_BUFFER", _u64(spare))
    ask("GET_TENSOR", a + _u64(0) + _u64(48))
    ask("FREE_BUFFER", _u64(handle))
    ask("GET_MAX_SIZE", _u32(0))


class _Client:
    """Sends one command at a time and waits for its reply, if it has one."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._stream: BinaryIO = link.makefile("rb")

    def __call__(self, name: str, payload: bytes = b"") -> bytes:
        self._link.sendall(bytes([NAMES.index(name)]) + _u64(len(payload)) + payload)
        if name in UNANSWERED:
            return b""
        (size,) = struct.unpack("<Q", self._stream.read(8))
        return self._stream.read(size)


def _u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _tensor(
    number: int,
    buffer: int,
    data: int,
    ne: Sequence[int],
    *,
    type_: int = F32,
    nb: Sequence[int] | None = None,
    op: int = NONE,
    flags: int = 0,
    src: Sequence[int] = (),
    name: str = "",
) -> bytes:
    """The 296 bytes of docs/protocol.md section 3.1, written out."""
    extents = [*ne, 1, 1, 1][:4]
    strides = nb or [4, 4 * extents[0], 4 * extents[0] * extents[1], 4 * extents[0] * extents[1] * extents[2]]
    sources = [*src, *[0] * 10][:10]
    record = struct.pack("<QIQ4I4II64si", number, type_, buffer, *extents, *strides, op, bytes(64), flags)
    record += struct.pack("<10QQQQ64si", *sources, 0, 0, data, name.encode(), 0)
    assert len(record) == 296
    return record


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.mkdir()
    main()

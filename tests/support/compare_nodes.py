"""Which operation differs? Runs a recorded graph node by node on the stock worker and on ours, and compares.

usage: python -m support.compare_nodes PORT [--prompt TEXT] [--graph N] [--options '-fa off'], PORT being that of a
running Drover worker. Every line is a node and the relative distance of the two results from the same operands: those
that the stock worker computed. For finding out why texts differ; not a test.
"""

import argparse
import shlex
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drover.ggml.tensor import Tensor
from drover.rpc import codec
from drover.rpc.messages import COMMAND_OF, TENSOR_BYTES, GetTensor, GraphCompute, Request, SetTensor
from support import drover
from support.peer import Peer
from support.processes import free_port
from support.proxy_record import UNANSWERED, Conversation, Relay
from support.replay import Replay, requests_of

METADATA_ONLY = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
COMPUTE = 16
FLOATS: dict[str, npt.DTypeLike] = {"F32": np.float32, "F16": np.float16}


def main(arguments: Sequence[str] | None = None) -> None:
    """Record a conversation, run one of its graphs in steps on both workers, print the distances."""
    options = _options(arguments)
    peer = Peer.find()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        conversation = _record(peer, folder, options.model, options.prompt, shlex.split(options.options))
        port = free_port()
        with peer.start_worker(folder / "stock.log", port):
            for node, theirs, ours in results(conversation, options.graph, port, options.port):
                print(f"{node.op.name:16} {node.name:60} {distance(theirs, ours):.1e}")


def results(
    conversation: Conversation, number: int, stock: int, drover_port: int
) -> Iterator[tuple[Tensor, npt.NDArray[Any], npt.NDArray[Any]]]:
    """Every computed node of the conversation's graph with this number, and what the two workers make of it."""
    requests = list(requests_of(b"".join(conversation.requests), 1 << 20))
    at = [i for i, request in enumerate(requests) if isinstance(request, GraphCompute)][number]
    graph = requests[at]
    assert isinstance(graph, GraphCompute)
    with (
        socket.create_connection(("127.0.0.1", stock)) as one,
        socket.create_connection(("127.0.0.1", drover_port)) as other,
    ):
        replays = Replay(one), Replay(other)
        for replay in replays:
            _replay_all(replay, requests[:at], conversation.replies)
        tensors = _tensors(graph)
        done = 0
        for count, node in _nodes(graph, tensors):
            # Inputs may lie where a later node writes: they are sent again before each step.
            for replay in replays:
                for request in _inputs(requests[:at]):
                    replay.exchange(request, None)
            replays[0].exchange(replace(graph, uid=0, nodes=graph.nodes[: 8 * done]), None)
            operands = {source: tensors[source] for source in node.src if source}
            for operand in operands.values():
                data = replays[0].ask(GetTensor(operand, 0, operand.nbytes))
                replays[1].exchange(SetTensor(operand, 0, 0, memoryview(data)), None)
            only = replace(graph, uid=0, nodes=graph.nodes[8 * (count - 1) : 8 * count])
            kind = FLOATS.get(node.type.name, np.uint8)
            raw = []
            for replay in replays:
                replay.exchange(only, None)
                raw.append(np.frombuffer(replay.ask(GetTensor(node, 0, node.nbytes)), kind))
            yield node, raw[0], raw[1]
            done = count


def distance(theirs: npt.NDArray[Any], ours: npt.NDArray[Any]) -> float:
    """Relative to the length of the stock worker's result, where both are finite."""
    one, other = theirs.astype(np.float64), ours.astype(np.float64)
    finite = np.isfinite(one) & np.isfinite(other)
    return float(np.linalg.norm((one - other)[finite])) / max(float(np.linalg.norm(one[finite])), 1e-30)


def _record(peer: Peer, folder: Path, model: Path, prompt: str, options: Sequence[str]) -> Conversation:
    port = free_port()
    with peer.start_worker(folder / "worker.log", port), Relay(port) as relay:
        asked = ("-p", prompt, "-n", "4", "--temp", "0", "-no-cnv", "-t", "1", "-c", "512", "--no-warmup", *options)
        placed = ("-fit", "off", "--rpc", f"127.0.0.1:{relay.port}", "-ngl", "99")
        done = peer.run("llama-completion", "-m", model, *asked, *placed, timeout=60)
        assert done.returncode == 0, done.stderr
    return max(relay.conversations, key=lambda conversation: len(conversation.requests))


def _replay_all(replay: Replay, requests: Sequence[Request], replies: Sequence[bytes]) -> None:
    pending = iter(replies)
    for request in requests:
        replay.exchange(request, None if COMMAND_OF[type(request)].name in UNANSWERED else next(pending))


def _inputs(requests: Sequence[Request]) -> list[Request]:
    """The run of SET_TENSOR right before a graph."""
    start = len(requests)
    while isinstance(requests[start - 1], SetTensor):
        start -= 1
    return list(requests[start:])


def _tensors(graph: GraphCompute) -> dict[int, Tensor]:
    """The records of a graph by id."""
    table = graph.tensors
    records = [codec.decode_tensor(table[at : at + TENSOR_BYTES]) for at in range(0, len(table), TENSOR_BYTES)]
    return {tensor.id: tensor for tensor in records}


def _nodes(graph: GraphCompute, tensors: dict[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Nodes that compute something, each with how many nodes run up to it."""
    for count, number in enumerate(np.frombuffer(graph.nodes, np.uint64).tolist(), 1):
        node = tensors[number]
        if node.op.name not in METADATA_ONLY and node.flags & COMPUTE:
            yield count, node


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--model", type=Path, default=drover.MODEL)
    parser.add_argument("--prompt", default="This program is free software")
    parser.add_argument("--graph", type=int, default=0, help="0: the prompt, 1: the first token after it")
    parser.add_argument("--options", default="", help="more options of llama-completion")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()

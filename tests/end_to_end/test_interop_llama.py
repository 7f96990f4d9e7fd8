"""Stock llama.cpp and Drover mixed in every way must write the same text as the stock tools alone."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from drover.worker.devices.cpu import gemm_k
from support import drover
from support.completions import (
    NEAR_TIE,
    ROUNDED_TIE,
    Ask,
    Token,
    compare,
    completion_request,
    drover_texts,
    generated_tokens,
    post,
    stock_complete,
    stock_texts,
    stock_tokenize,
)
from support.peer import Peer
from support.processes import free_port

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

PROMPTS = Path(__file__).with_name("prompts.txt").read_text().splitlines()
TOKENS = 64
TIES = {"F32": NEAR_TIE, "Q4_K_M": NEAR_TIE if gemm_k.COMPILED else ROUNDED_TIE}
"""The demo model, widened and as it is: how close two tokens must be to count as equal. With the tile unit every sum of
the demo model is ggml's to the last bit; without it, sums of 8 and more columns are formed in another order."""
FLIPS = 50
"""With near ties, at most one token in so many may differ."""
Completions = list[tuple[str, list[int], list[Token]]]


@dataclass(frozen=True, slots=True)
class Reference:
    """What the stock tools write for a model when no worker is involved."""

    model: Path
    tie: float
    completions: Completions


@pytest.fixture(scope="module")
def wide_model(peer: Peer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with every weight as a 32-bit float, so that nothing is rounded while it runs."""
    wide = tmp_path_factory.mktemp("wide") / "license-demo.F32.gguf"
    done = peer.run("llama-quantize", "--allow-requantize", drover.MODEL, wide, "F32", timeout=60)
    assert done.returncode == 0, done.stderr
    return wide


@pytest.fixture(scope="module", params=TIES)
def reference(request: pytest.FixtureRequest, peer: Peer, wide_model: Path, logs: Path) -> Reference:
    """What the stock tools write when no worker is involved."""
    model = wide_model if request.param == "F32" else drover.MODEL
    port = free_port()
    with peer.start_server(logs / "reference.log", port, model, (), "-np", "1"):
        return Reference(model, TIES[request.param], complete_all(port, PROMPTS))


@pytest.fixture(scope="module")
def mixed_workers(drover_workers: list[int], stock_workers: list[int]) -> list[int]:
    """One worker of each kind."""
    return [drover_workers[0], stock_workers[0]]


def complete_all(port: int, prompts: Sequence[str]) -> Completions:
    """Greedy tokens of a stock server for each prompt."""
    tokenized = [(text, stock_tokenize(port, text)) for text in prompts]
    return [(text, ids, stock_complete(port, ids, TOKENS)) for text, ids in tokenized]


def servers(workers: Sequence[int]) -> str:
    """The value of a `--rpc` option."""
    return ",".join(f"127.0.0.1:{port}" for port in workers)


def same_text(completions: Completions, ask: Ask, tie: float) -> None:
    """Compare every prompt; print the tolerable differences, fail on the others."""
    found = [difference for text, ids, tokens in completions for difference in compare(text, ids, tokens, ask, tie)]
    for difference in found:
        if difference.tolerable:
            print(f"near tie: {difference}")
    assert [str(d) for d in found if not d.tolerable] == []
    assert len(found) <= sum(len(tokens) for _, _, tokens in completions) // FLIPS


def same_until_tie(expected: Sequence[Token], got: Sequence[Token], tie: float) -> None:
    """Compare one answer that cannot be asked for again from the middle: all that follows a near tie may differ."""
    assert len(got) == len(expected)
    for at, (one, other) in enumerate(zip(expected, got, strict=True)):
        if one.id != other.id:
            print(f"first difference at token {at} of {len(expected)}, lead {one.margin:.6f}")
            assert one.margin <= tie
            return


def test_reference_is_long_enough(reference: Reference) -> None:
    assert sum(len(tokens) == TOKENS for _, _, tokens in reference.completions) >= 20
    lengths = [len(ids) for _, ids, _ in reference.completions]
    assert min(lengths) <= 3
    assert max(lengths) > 200


@pytest.mark.parametrize("kind", ["stock_workers", "drover_workers", "mixed_workers"])
def test_stock_server_on_two_workers(
    kind: str, request: pytest.FixtureRequest, peer: Peer, reference: Reference, logs: Path
) -> None:
    workers = request.getfixturevalue(kind)
    port = free_port()
    with peer.start_server(logs / f"server-on-{kind}.log", port, reference.model, workers, "-np", "1"):
        same_text(reference.completions, stock_texts(port), reference.tie)


@pytest.mark.parametrize("kind", ["drover_workers", "stock_workers", "mixed_workers"])
def test_our_coordinator_on_two_workers(
    kind: str, request: pytest.FixtureRequest, reference: Reference, logs: Path
) -> None:
    workers = request.getfixturevalue(kind)
    port = free_port()
    with drover.start_coordinator(logs / f"coordinator-on-{kind}.log", port, workers, model=reference.model):
        same_text(reference.completions, drover_texts(port), reference.tie)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("-fa", "off"), id="flash attention off"),
        pytest.param(("-fa", "on"), id="flash attention on"),
        pytest.param(("-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0"), id="quantized cache"),
        pytest.param(("-fa", "off", "-ctk", "f32", "-ctv", "f32"), id="single-precision cache"),
        pytest.param(("-ub", "32"), id="prompts in pieces"),
        pytest.param(("-nkvo",), id="cache kept by the client"),
    ],
)
def test_stock_server_with_options(
    options: tuple[str, ...], peer: Peer, wide_model: Path, drover_workers: list[int], logs: Path
) -> None:
    port = free_port()
    with peer.start_server(logs / "options-alone.log", port, wide_model, (), "-np", "1", *options):
        alone = complete_all(port, PROMPTS[::3])
    with peer.start_server(logs / "options.log", port, wide_model, drover_workers, "-np", "1", *options):
        same_text(alone, stock_texts(port), ROUNDED_TIE if "q8_0" in options else NEAR_TIE)


def test_two_slots_at_once(peer: Peer, drover_workers: list[int], reference: Reference, logs: Path) -> None:
    port = free_port()
    options = ("-np", "2", "-c", "2048")
    with (
        peer.start_server(logs / "slots.log", port, reference.model, drover_workers, *options),
        ThreadPoolExecutor(2) as pool,
    ):
        ask, tie = stock_texts(port), reference.tie
        halves = [pool.submit(same_text, reference.completions[start::2], ask, tie) for start in (0, 1)]
        for half in halves:
            half.result()


def test_context_shift(peer: Peer, wide_model: Path, drover_workers: list[int], logs: Path) -> None:
    port = free_port()
    options = ("-np", "1", "-c", "256", "--context-shift")
    with peer.start_server(logs / "shift-alone.log", port, wide_model, (), *options):
        alone = stock_complete(port, PROMPTS[4], 400)
    assert len(alone) == 400
    with peer.start_server(logs / "shift.log", port, wide_model, drover_workers, *options):
        shifted = stock_complete(port, PROMPTS[4], 400)
    same_until_tie(alone, shifted, NEAR_TIE)


def test_slot_saved_and_restored(
    peer: Peer, drover_workers: list[int], reference: Reference, tmp_path: Path, logs: Path
) -> None:
    port = free_port()
    _, ids, tokens = reference.completions[-1]
    known = [token.id for token in tokens[:8]]
    options = ("-np", "1", "--slot-save-path", f"{peer.inside(tmp_path)}/")
    with peer.start_server(logs / "slot.log", port, reference.model, drover_workers, *options):
        stock_complete(port, ids, 8, cache_prompt=True)
        saved = post(port, "/slots/0?action=save", {"filename": "slot.bin"})
        assert saved["n_saved"] >= len(ids)
        stock_complete(port, PROMPTS[0], 8, cache_prompt=True)
        post(port, "/slots/0?action=restore", {"filename": "slot.bin"})
        again = post(port, "/completion", completion_request([*ids, *known], 24, cache_prompt=True))
    assert again["timings"]["prompt_n"] < len(ids)
    same_until_tie(tokens[8:32], generated_tokens(again), reference.tie)


def test_completion_tool(peer: Peer, wide_model: Path, drover_workers: list[int]) -> None:
    prompt = ("-p", PROMPTS[5], "-n", str(TOKENS), "--temp", "0")
    arguments = ("-m", wide_model, *prompt, "-no-cnv", "-t", "1", "-c", "512")
    alone = peer.complete(*arguments, "--device", "none", "--no-repack", timeout=60)
    assert alone.returncode == 0, alone.stderr
    remote = peer.complete(*arguments, "-ngl", "99", "--rpc", servers(drover_workers), timeout=120)
    assert remote.returncode == 0, remote.stderr
    assert remote.stdout == alone.stdout


def test_bench_tool(peer: Peer, drover_workers: list[int]) -> None:
    measured = ("-p", "64", "-n", "8", "-r", "1", "-t", "1", "-o", "json")
    placed = ("-ngl", "99", "--rpc", servers(drover_workers))
    done = peer.run("llama-bench", "-m", drover.MODEL, *measured, *placed, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [row["avg_ts"] > 0 for row in json.loads(done.stdout)] == [True, True]

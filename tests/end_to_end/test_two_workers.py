"""The same prompt through one worker, two, three, an uneven split: the same tokens, and those of plain numpy.

Workers here are real ones in threads of the test, on the reference device.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from drover.coordinator.loading import CacheTypes
from drover.coordinator.sequence import Job, TokenEvent
from drover.ggml.types import BY_NAME
from support import driving, numpy_llama, tiny_model
from support.tiny_model import Tiny
from support.worker_thread import worker

PROMPTS = ([1], [5, 9, 2, 77, 31, 8, 8, 40, 13], list(range(70)))
LENGTH = 12


@pytest.fixture(scope="module")
def endpoints() -> Iterator[list[str]]:
    with worker() as first, worker() as second, worker() as third:
        yield [first, second, third]


def settings(tiny: Tiny, **more: float) -> numpy_llama.Settings:
    return numpy_llama.Settings(tiny.layers, tiny.heads, tiny.kv_heads, tiny.head_width, **more)  # type: ignore[arg-type]


MODELS = {
    "plain": (Tiny(), {}),
    "tied": (Tiny(tied=True), {}),
    "biases": (Tiny(biases=True), {}),
    "one head each": (Tiny(heads=4, kv_heads=4), {}),
    "wide heads": (Tiny(width=48, heads=2, kv_heads=1, head_width=32), {}),
    "frequency factors": (Tiny(factors=True), {}),
    "linear scaling": (Tiny(metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}), {"linear": 4.0}),
    "yarn": (
        Tiny(
            metadata={
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
            }
        ),
        {"yarn": 4.0, "original_context": 128},
    ),
    "F16": (Tiny(type="F16"), {}),
    "BF16": (Tiny(type="BF16"), {}),
    "Q8_0": (Tiny(type="Q8_0"), {}),
    "Q4_0": (Tiny(type="Q4_0"), {}),
}


@pytest.mark.parametrize(("tiny", "more"), MODELS.values(), ids=MODELS)
def test_logits_are_those_of_plain_numpy(
    tiny: Tiny, more: dict[str, float], endpoints: list[str], tmp_path: Path
) -> None:
    weights = tiny_model.write(tmp_path / "tiny.gguf", tiny)
    prompt = PROMPTS[1]
    heard = driving.Heard()
    with driving.engine(tmp_path / "tiny.gguf", endpoints[:2]) as engine:
        engine.submit(Job(tuple(prompt), 4, driving.GREEDY, top_logprobs=tiny.vocab), heard.publish)
        assert heard.wait().reason == "length"
    expected = numpy_llama.logits(weights, settings(tiny, **more), [*prompt, *heard.tokens])[len(prompt) - 1 : -1]
    expected -= np.log(np.exp(expected).sum(-1, keepdims=True))
    for event, row in zip(heard.events, expected, strict=False):
        assert isinstance(event, TokenEvent)
        got = np.array([logprob for _, logprob in sorted(event.top)])
        np.testing.assert_allclose(got, row, atol=0.02)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    tiny = Tiny(layers=4)
    weights = tiny_model.write(path, tiny)
    return path, [numpy_llama.greedy(weights, settings(tiny), prompt, LENGTH) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("count", "cuts"), [(1, None), (2, None), (2, [1]), (2, [4]), (3, None)], ids=["1", "2", "1:4", "4:head", "3"]
)
def test_every_split_gives_the_same_tokens(
    count: int, cuts: list[int] | None, model: tuple[Path, list[list[int]]], endpoints: list[str]
) -> None:
    path, expected = model
    with driving.engine(path, endpoints[:count], cuts=cuts) as engine:
        assert [driving.generate(engine, prompt, LENGTH) for prompt in PROMPTS] == expected


@pytest.mark.parametrize("batch_size", [1, 16, 69])
def test_prompt_pieces_give_the_same_tokens(
    batch_size: int, model: tuple[Path, list[list[int]]], endpoints: list[str]
) -> None:
    path, expected = model
    with driving.engine(path, endpoints[:2], batch_size=batch_size) as engine:
        assert [driving.generate(engine, prompt, LENGTH) for prompt in PROMPTS] == expected


def test_sequences_together_do_not_see_each_other(model: tuple[Path, list[list[int]]], endpoints: list[str]) -> None:
    path, expected = model
    with driving.engine(path, endpoints[:2], batch_size=16, slots=3) as engine:
        heard = [driving.Heard() for _ in PROMPTS]
        for prompt, each in zip(PROMPTS, heard, strict=True):
            engine.submit(Job(tuple(prompt), LENGTH, driving.GREEDY), each.publish)
        assert [each.wait().reason for each in heard] == ["length"] * 3
        assert [each.tokens for each in heard] == expected


@pytest.mark.parametrize("name", ["F32", "Q8_0"])
def test_cache_types(name: str, endpoints: list[str], tmp_path: Path) -> None:
    tiny = Tiny(head_width=32, heads=2, kv_heads=1)
    weights = tiny_model.write(tmp_path / "tiny.gguf", tiny)
    expected = numpy_llama.greedy(weights, settings(tiny), PROMPTS[1], LENGTH)
    with driving.engine(
        tmp_path / "tiny.gguf", endpoints[:2], types=CacheTypes(BY_NAME[name], BY_NAME[name])
    ) as engine:
        assert driving.generate(engine, PROMPTS[1], LENGTH) == expected


def test_two_devices_of_one_worker(model: tuple[Path, list[list[int]]]) -> None:
    path, expected = model
    with worker(devices=2) as endpoint, driving.engine(path, [endpoint]) as engine:
        assert driving.generate(engine, PROMPTS[1], LENGTH) == expected[1]


def test_the_same_context_twice_reuses_freed_cells(model: tuple[Path, list[list[int]]], endpoints: list[str]) -> None:
    path, expected = model
    with driving.engine(path, endpoints[:1]) as engine:
        for _ in range(9):
            assert driving.generate(engine, PROMPTS[2], LENGTH) == expected[2]

"""llama.cpp's own tests through a worker: every architecture, and of every operation a sample with all its types.

`make conformance` runs all of them.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from support import drover
from support.peer import Peer
from support.suites import Outcome, Suites, kinds, sample

THREADS = "2"


@pytest.fixture(scope="module")
def suites(peer: Peer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suites]:
    def start(log: Path, port: int) -> drover.Running:
        return drover.start_worker(log, port, "--threads", THREADS)

    with closing(Suites(peer, tmp_path_factory.mktemp("conformance"), start)) as found:
        yield found


@pytest.mark.timeout(900)
def test_architectures(suites: Suites) -> None:
    outcomes = suites.architectures()
    assert sum(outcome.passed for outcome in outcomes) >= 138
    assert faults(outcomes) == []


@pytest.mark.timeout(900)
def test_a_sample_of_all_operations(suites: Suites) -> None:
    listed = suites.cases()
    chosen = sample(listed)
    assert all(kinds(chosen[name]) == kinds(listed[name]) for name in listed)
    outcomes = suites.sampled(chosen)
    assert faults(outcomes) == []
    assert {outcome.name for outcome in outcomes} == set(listed)


def faults(outcomes: list[Outcome]) -> list[str]:
    return [f"{outcome.name}: {fault}" for outcome in outcomes for fault in (*outcome.failed, *outcome.aborted)]

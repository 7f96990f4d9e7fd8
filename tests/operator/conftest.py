from collections.abc import Iterator

import pytest
import structlog

from support.operator_world import FETCHED, HEADER, LOADED, World, body


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


@pytest.fixture
def world() -> World:
    made = World()
    made.api.create(body())
    made.api.ends = {"herd-header": (0, HEADER), "herd-fetch": (0, FETCHED), "herd-load": (0, LOADED)}
    return made

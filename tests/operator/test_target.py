from typing import Any

import pytest

from drover.errors import SpecError
from drover_operator import target
from support.operator_world import DEFAULTS, body


def test_a_target() -> None:
    found = target.read(body(), DEFAULTS)
    assert (found.name, found.namespace, found.uid, found.generation) == ("herd", "farm", "u", 1)
    assert found.image == found.serving_image == "drover-worker:1"


def test_images_from_the_nearest_that_says_one() -> None:
    found = target.read(body(image="a:1", serving={"image": "b:1"}), DEFAULTS)
    assert (found.image, found.serving_image) == ("a:1", "b:1")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"model": {"source": "m.gguf"}}, "spec.model.source: 'm.gguf' is a path, which is for `drover up` only"),
        ({"workers": []}, "spec.workers: must not be empty"),
        (
            {"workers": [{"name": "a", "replica": 1}]},
            "spec.workers[0].replica: unknown field; did you mean 'replicas'?",
        ),
        ({"context": "long"}, "spec.context: 'long' is not a whole number"),
        ({"context": 0, "parallel": 0}, "spec.parallel: 0 is out of range; it must be at least 1"),
    ],
)
def test_a_spec_that_is_not_valid_is_one_line_a_fault(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(SpecError) as error:
        target.read(body(**changes), DEFAULTS)
    assert fault in str(error.value).splitlines()

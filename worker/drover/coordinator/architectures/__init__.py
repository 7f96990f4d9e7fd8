"""Model architectures: one file each, and one row here.

Reading order: `blocks` (what they are made of), then any of them.
"""

from collections.abc import Callable

from drover.coordinator.architectures import llama
from drover.coordinator.architectures.blocks import Model
from drover.coordinator.model_index import ModelIndex
from drover.errors import ArchitectureError

READERS: dict[str, Callable[[ModelIndex], Model]] = {
    "llama": llama.read,
}


def read(model: ModelIndex) -> Model:
    """Understand a model file; ArchitectureError if its architecture is not in the table."""
    reader = READERS.get(model.architecture)
    if reader is None:
        known = ", ".join(sorted(READERS))
        raise ArchitectureError(
            f"{model.path}: architecture {model.architecture!r} is not supported; supported: {known}",
            model.architecture,
        )
    return reader(model)

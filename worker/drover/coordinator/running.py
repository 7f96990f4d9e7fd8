"""Running: a coordinator whose model is in place, as those who use or describe it see it."""

from dataclasses import dataclass

from drover.coordinator.architectures.blocks import Model
from drover.coordinator.chat import ChatTemplate
from drover.coordinator.display import StageRow
from drover.coordinator.engine import Engine
from drover.coordinator.loading import LoadedStage
from drover.coordinator.model_file import ModelFile
from drover.coordinator.pipeline import Meter
from drover.coordinator.remote import RemoteDevice
from drover.coordinator.tokenizer import Tokenizer
from drover.reports import ModelFacts


@dataclass(frozen=True, slots=True)
class Running:
    """A coordinator that answers: rows, stages and meters are in the order of the layers."""

    engine: Engine
    tokenizer: Tokenizer
    chat: ChatTemplate
    file: ModelFile
    model: ModelFacts
    devices: list[RemoteDevice]
    """All that were reached, those without a stage too."""
    rows: list[StageRow]
    stages: list[LoadedStage]
    meters: list[Meter]
    load_seconds: float
    decoder: Model
    """The model understood: how the graphs of its stages are built."""

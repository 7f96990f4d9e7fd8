"""What a model takes on its devices, from the heads of its files at their source: nothing else of it is downloaded."""

import structlog

from drover import plan
from drover.coordinator.model_index import ModelIndex, Part
from drover.coordinator.needs import Needs
from drover.coordinator.settings import Config
from drover.fetch.locate import OLLAMA_REGISTRY, locate
from drover.fetch.preview import head
from drover.reports import HeaderReport
from drover.sizes import format_size
from drover.sources import parse

log = structlog.get_logger()


def measure(
    source: str,
    config: Config,
    *,
    sha256: str | None = None,
    token: str | None = None,
    registry: str = OLLAMA_REGISTRY,
) -> HeaderReport:
    """Read the head of every file of a model, for a coordinator so configured; the file that it names is not looked at.

    FetchError, ModelError or RequestError if the model cannot be had, is none that we load, or not as configured.
    """
    wanted = None if sha256 is None else sha256.lower()
    remotes = locate(parse(source), token, registry, wanted)
    heads = [head(remote, first=number == 0) for number, remote in enumerate(remotes)]
    needs = Needs(ModelIndex([Part(found.remote.url, found.remote.name, header) for found, header in heads]), config)
    total, facts = sum(found.remote.size or 0 for found, _ in heads), needs.facts
    log.info("header read", url=remotes[0].url, files=len(heads), bytes=total, layers=facts.layers)
    held = sum(unit.bytes for unit in needs.units)
    return HeaderReport(
        True,
        "HeaderRead",
        f"{remotes[0].name}, {format_size(total)}, {facts.architecture}, {facts.layers} layers; with a context of "
        f"{needs.context} tokens it takes {format_size(held)}, and {format_size(needs.reserve)} of every device",
        bytes=total,
        sha256=remotes[0].sha256,
        architecture=facts.architecture,
        layers=facts.layers,
        units=tuple(plan.packed(unit.bytes for unit in needs.units)),
        reserve=needs.reserve,
    )

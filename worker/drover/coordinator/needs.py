"""What a model as configured takes on its devices, by the headers of its files: no data of a tensor is read."""

from collections.abc import Sequence

import structlog

from drover import plan
from drover.coordinator import architectures
from drover.coordinator.architectures.blocks import Model, Span, StepShape
from drover.coordinator.kv_cache import round_up
from drover.coordinator.loading import CacheTypes, cache_bytes, cache_of, weight_of
from drover.coordinator.model_index import ModelIndex
from drover.coordinator.pipeline import compute_bytes
from drover.coordinator.settings import CACHE_TYPES, DEFAULT_CONTEXT, Config
from drover.errors import RequestError
from drover.ggml.types import BY_NAME
from drover.reports import ModelFacts

log = structlog.get_logger()


class Needs:
    """The model understood, and its memory: that of each unit, and `reserve` for computing on every device."""

    def __init__(self, index: ModelIndex, config: Config) -> None:
        self._index = index
        self.model = architectures.read(index)
        self.types = _cache_types(config, self.model)
        self.context = _context(config, self.model)
        self.cells = round_up(self.context) * config.parallel
        self.largest = StepShape(config.batch_size, self.cells, min(config.parallel, config.batch_size))
        self.units = self._units()
        self.reserve = self._reserve()
        self._shares = config.tensor_split

    def split(self, rooms: Sequence[plan.Room]) -> plan.Plan:
        """Layers over devices; PlanError if they do not fit."""
        return plan.split(self.units, rooms, self._shares, self.reserve)

    def span(self, stage: plan.Stage) -> Span:
        """The units of a planned stage."""
        return Span(stage.first, stage.end, self.model.hyper.layers)

    def weight_bytes(self, span: Span) -> int:
        """Bytes of the weights of a stage."""
        return sum(self._index.tensors[name].nbytes for name in self.model.weights(span))

    def cache_bytes(self, span: Span) -> int:
        """Bytes of the KV cache of a stage."""
        return cache_bytes(self.model, self.cells, self.types) * len(span.blocks)

    @property
    def facts(self) -> ModelFacts:
        """The model in a report."""
        total = sum(tensor.nbytes for tensor in self._index.tensors.values())
        return ModelFacts(self._index.architecture, self.model.hyper.layers, total)

    def _units(self) -> list[plan.Unit]:
        """Each layer's weights and KV cache, then the head; what goes with the first layer counts there."""
        layers = self.model.hyper.layers
        cache = cache_bytes(self.model, self.cells, self.types)
        tensors = self._index.tensors
        sizes = [sum(tensors[name].nbytes for name in unit) for unit in self.model.units]
        sizes = [size + cache if index < layers else size for index, size in enumerate(sizes)]
        sizes[0] += sum(tensors[name].nbytes for name in (*self.model.entry, *self.model.shared))
        return plan.units(sizes)

    def _reserve(self) -> int:
        """Compute memory to set aside on every device."""
        span = Span(0, len(self.units), self.model.hyper.layers)
        weights = {name: weight_of(self._index.tensors[name]) for name in self.model.weights(span)}
        caches = {layer: cache_of(self.model, layer, self.cells, self.types) for layer in span.blocks}
        halves = [half for pair in caches.values() for half in pair]
        for number, tensor in enumerate([*weights.values(), *halves], 1):
            tensor.buffer, tensor.data = 1, number  # any place of its own will do
        return compute_bytes(self.model, weights, caches, self.largest)


def _context(config: Config, model: Model) -> int:
    if config.context is None:
        return min(model.hyper.context, DEFAULT_CONTEXT)
    if config.context > model.hyper.context:
        log.warning("context is longer than the model was made for", asked=config.context, model=model.hyper.context)
    return config.context


def _cache_types(config: Config, model: Model) -> CacheTypes:
    for name in (config.cache_type_k, config.cache_type_v):
        if name.lower() not in CACHE_TYPES:
            raise RequestError(f"KV cache type {name!r} is unknown; choose one of {', '.join(CACHE_TYPES)}")
    types = CacheTypes(BY_NAME[config.cache_type_k.upper()], BY_NAME[config.cache_type_v.upper()])
    for type_, width in ((types.k, model.hyper.key_width), (types.v, model.hyper.value_width)):
        if width % type_.block_size:
            raise RequestError(
                f"a KV cache of type {type_.name} stores {type_.block_size} elements at a time, and the heads of this "
                f"model have {width}; use --cache-type-k f16 --cache-type-v f16"
            )
    return types

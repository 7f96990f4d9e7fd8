"""What a coordinator says of itself: its state for people and the operator, its figures for Prometheus.

Asked at any time, from before the model is loaded on; no question waits for a step of the engine.
"""

from collections import Counter
from typing import Any

import drover
from drover.coordinator.lifecycle import Lifecycle
from drover.coordinator.running import Running
from drover.coordinator.settings import Config
from drover.metrics import Figure, Sample, single

Json = dict[str, Any]


class Status:
    """The coordinator as others see it; `running` is there once the model is loaded."""

    def __init__(self, config: Config, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.running: Running | None = None
        self.requests: Counter[tuple[str, int]] = Counter()
        """Answers of the API by path and HTTP status."""
        self._config = config

    def failure(self) -> str | None:
        """Why nothing can be computed until the coordinator is started again; None if that is not so."""
        if self.running is None:
            return None
        lost = (device.lost for device in self.running.devices)
        return self.running.engine.failure or next((why for why in lost if why is not None), None)

    def why_not_ready(self) -> str | None:
        """Why requests must wait or go elsewhere; None if they need not."""
        return self.lifecycle.why_not_ready() or self.failure()

    def state(self) -> Json:
        """Everything, for /state."""
        config, running = self._config, self.running
        return {
            "version": drover.__version__,
            "phase": self.lifecycle.phase,
            "ready": self.why_not_ready() is None,
            "reason": self.why_not_ready(),
            "model": {"name": config.model_name, "file": config.model.name, **_facts(running)},
            "context": config.context if running is None else running.engine.context,
            "parallel": config.parallel,
            "cacheTypes": {"k": config.cache_type_k, "v": config.cache_type_v},
            "loading": [
                {"device": device, "bytes": done, "total": total}
                for device, (done, total) in self.lifecycle.progress.items()
            ],
            "placement": [] if running is None else _placement(running),
            "requests": {"running": 0, "waiting": 0} if running is None else _queue(running),
        }

    def figures(self) -> list[Figure]:
        """Everything that can be counted, for /metrics."""
        requests: tuple[Sample, ...] = tuple(
            ((path, str(status)), count) for (path, status), count in sorted(self.requests.items())
        )
        return [
            single("drover_ready", "Whether requests are answered.", "gauge", self.why_not_ready() is None),
            Figure("drover_requests", "Answers of the API.", "counter", requests, labels=("path", "status")),
            *([] if self.running is None else [*_engine_figures(self.running), *_stage_figures(self.running)]),
        ]


def _facts(running: Running | None) -> Json:
    if running is None:
        return {}
    model = running.model
    return {"architecture": model.architecture, "layers": model.layers, "bytes": model.bytes}


def _placement(running: Running) -> list[Json]:
    return [
        {
            "worker": row.worker,
            "device": row.index,
            "layers": row.layers,
            "bytes": row.weights + row.cache,
            "weightBytes": row.weights,
            "cacheBytes": row.cache,
            "uploaded": stage.uploaded,
            "cached": stage.cached,
        }
        for row, stage in zip(running.rows, running.stages, strict=True)
    ]


def _queue(running: Running) -> Json:
    busy, waiting = running.engine.queue
    return {"running": busy, "waiting": waiting}


def _engine_figures(running: Running) -> list[Figure]:
    engine = running.engine
    busy, waiting = engine.queue
    return [
        single("drover_requests_running", "Sequences that are being generated.", "gauge", busy),
        single("drover_requests_waiting", "Sequences that wait for their turn.", "gauge", waiting),
        single("drover_prompt_tokens", "Tokens of prompts computed.", "counter", engine.prompt_tokens),
        single("drover_generated_tokens", "Tokens generated.", "counter", engine.generated_tokens),
        single(
            "drover_tokens_per_second",
            "Tokens generated a second, over recent steps.",
            "gauge",
            engine.tokens_per_second,
        ),
        single("drover_load_seconds", "How long loading the model took.", "gauge", running.load_seconds),
        single("drover_uploaded_bytes", "Weights sent.", "gauge", sum(stage.uploaded for stage in running.stages)),
        single("drover_cached_bytes", "Weights workers had.", "gauge", sum(stage.cached for stage in running.stages)),
    ]


def _stage_figures(running: Running) -> list[Figure]:
    """By stage its time and tokens in either phase; by worker its bytes on the wire, for devices share a connection."""
    stages = [(str(number), row.worker) for number, row in enumerate(running.rows)]
    meters = list(zip(stages, running.meters, strict=True))
    seconds = [
        pair
        for stage, meter in meters
        for pair in (((*stage, "prompt"), meter.prompt_seconds), ((*stage, "decode"), meter.decode_seconds))
    ]
    tokens = [
        pair
        for stage, meter in meters
        for pair in (((*stage, "prompt"), meter.prompt_tokens), ((*stage, "decode"), meter.decode_tokens))
    ]
    wire = {device.endpoint: device.traffic for device in running.devices}
    moved = [
        pair
        for worker, (sent, received) in wire.items()
        for pair in (((worker, "sent"), sent), ((worker, "received"), received))
    ]
    labels = ("stage", "worker", "phase")
    return [
        Figure("drover_stage_seconds", "Seconds a stage took.", "counter", tuple(seconds), labels),
        Figure("drover_stage_tokens", "Tokens a stage computed.", "counter", tuple(tokens), labels),
        Figure(
            "drover_wire_bytes", "Bytes between here and a worker.", "counter", tuple(moved), ("worker", "direction")
        ),
    ]

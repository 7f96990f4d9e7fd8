"""InferenceClusters to work on, and a world to work in."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from drover_operator.mirror import Mirror, Mirrored
from drover_operator.reconcile import Outcome, reconcile
from drover_operator.target import Defaults
from support.fake_kubernetes import FakeKubernetes

DEFAULTS = Defaults("drover-worker:1", "drover-system")
START = datetime(2026, 1, 1, tzinfo=UTC)
LOADED = {
    "ok": True,
    "reason": "Verified",
    "message": "2 layers on 2 devices as planned",
    "stages": [
        {"worker": "herd-w-0.herd-w.farm.svc:50052", "device": 0, "layers": "0-4", "bytes": 100, "wireSent": 7},
        {"worker": "herd-w-1.herd-w.farm.svc:50052", "device": 0, "layers": "5-7 + output", "bytes": 50, "odd": 1},
    ],
    "tokensPerSecond": 12.5,
    "loadSeconds": 3.25,
    "bytesUploaded": 150,
    "bytesCached": 0,
    "text": "not kept",
}
HEADER = {
    "ok": True,
    "reason": "HeaderRead",
    "message": "m.gguf, 1.0 GiB, llama, 8 layers",
    "bytes": 1 << 30,
    "sha256": None,
    "architecture": "llama",
    "layers": 8,
    "units": [[20, 5], [10, 3], [20, 1]],
    "reserve": 4,
}
FETCHED = {"ok": True, "reason": "Fetched", "message": "", "path": "/models/m.gguf", "bytes": 1 << 30}


def body(**spec: Any) -> dict[str, Any]:
    """An InferenceCluster as the API server keeps it."""
    given = {
        "model": {"source": "hf://org/repo/m.gguf", "storage": {"size": "2Gi"}},
        "workers": [{"name": "w", "replicas": 2, "memory": "1Gi"}],
    } | spec
    return {
        "apiVersion": "drover.dev/v1alpha1",
        "kind": "InferenceCluster",
        "metadata": {"name": "herd", "namespace": "farm", "uid": "u", "generation": 1},
        "spec": given,
    }


@dataclass
class World:
    """An operator and its surroundings; time passes only when told.

    The operator sees objects through a mirror: what happened since its last cycle is delivered before the next one.
    """

    api: FakeKubernetes = field(default_factory=FakeKubernetes)
    mirror: Mirror | None = None
    known: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    now: datetime = START
    totals: dict[str, list[int]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    fault: Exception | None = None

    def cycle(self) -> Outcome:
        self.deliver()
        assert self.mirror is not None
        return reconcile("farm", "herd", Mirrored(self.api, self.mirror), self.probe, DEFAULTS, lambda: self.now)

    def restart(self) -> None:
        """The operator starts anew, and knows nothing."""
        self.mirror, self.known = None, {}

    def deliver(self) -> None:
        """Tell the mirror what changed."""
        if self.mirror is None:
            self.mirror = Mirror(self.seconds)
        for (kind, *_), body in [(key, body) for key, body in self.known.items() if key not in self.api.objects]:
            self.mirror.gone(kind, body)
        for (kind, *_), body in self.api.objects.items():
            self.mirror.put(kind, body)
        self.known = copy.deepcopy(self.api.objects)

    def probe(self, host: str, port: int) -> Sequence[int]:
        assert port == 50052
        self.asked.append(host)
        if self.fault is not None:
            raise self.fault
        return self.totals.get(host, [1 << 30])

    def run(self, cycles: int = 30) -> None:
        """Cycles and controllers in turn until nothing is written any more."""
        for _ in range(cycles):
            self.api.settle()
            writes = len(self.api.writes)
            self.cycle()
            if len(self.api.writes) == writes:
                return
        raise AssertionError(f"it does not come to rest: {self.api.writes[-20:]}")

    def seconds(self) -> float:
        return (self.now - START).total_seconds()

    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.api.one("InferenceCluster", "herd")["status"]
        return found

    def said(self, name: str) -> tuple[str, str]:
        row = next(row for row in self.status["conditions"] if row["type"] == name)
        return row["status"], row["reason"]

    def message(self, name: str) -> str:
        return str(next(row for row in self.status["conditions"] if row["type"] == name)["message"])

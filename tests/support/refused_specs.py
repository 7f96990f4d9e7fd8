"""Specs that the API server refuses, and what it says: for tests with one, and for those without.

A row is a change of SPEC (a dotted path and its value), the words of the refusal, and whether `drover.spec` refuses it
too; what it does not refuse means something on one machine.
"""

import copy
from dataclasses import dataclass
from typing import Any

SPEC: dict[str, Any] = {
    "model": {"source": "hf://org/repo/m.gguf", "storage": {"size": "2Gi"}},
    "workers": [{"name": "w", "replicas": 2, "cache": {"size": "1Gi"}}, {"name": "v"}],
}


@dataclass(frozen=True)
class Refused:
    path: str
    value: Any
    words: str
    everywhere: bool = True


REFUSED = [
    Refused("model.source", "models/m.gguf", "a path is for `drover up` only", everywhere=False),
    Refused("model.source", "s3://bucket/m.gguf", "source must be one of hf://ORG/REPO/FILE.gguf"),
    Refused("model.source", "hf://org/repo/m.bin", "must look like hf://ORG/REPO/FILE.gguf[@REVISION]"),
    Refused("model.source", "pvc://claim/../m.gguf", "must look like pvc://CLAIM/PATH.gguf"),
    Refused("model.source", "https://example.com", "must look like https://HOST/PATH"),
    Refused("model.source", "ollama://", "must look like ollama://[OWNER/]NAME[:TAG]"),
    Refused("model.storage", {}, "a model that is downloaded needs room: give storage.size", everywhere=False),
    Refused("model.storage.size", "much", "spec.model.storage.size"),
    Refused("model.sha256", "abc", "spec.model.sha256"),
    Refused("workers", [], "spec.workers"),
    Refused("workers.1.name", "w", "two groups of workers have the same name"),
    Refused("workers.0.name", "W", "spec.workers[0].name"),
    Refused("workers.0.name", "w" * 60, "may have 50 characters together", everywhere=False),
    Refused("workers.0.replicas", 0, "spec.workers[0].replicas"),
    Refused("workers.0.device", "gpu", "spec.workers[0].device"),
    Refused("workers.0.devicesPerWorker", 2, "only a cuda worker can have more than one device"),
    Refused("workers.0.memory", "lots", "spec.workers[0].memory"),
    Refused("workers.0.cache", {"enabled": True}, "a cache needs room: give cache.size", everywhere=False),
    Refused(
        "workers.0.env", [{"name": "A", "value": "", "valueFrom": {}}], "give value or valueFrom", everywhere=False
    ),
    Refused("model.env", [{"name": "A", "value": "", "valueFrom": {}}], "give value or valueFrom", everywhere=False),
    Refused("model.caConfigMapRef", {"key": "ca.crt"}, "spec.model.caConfigMapRef.name"),
    Refused("imagePullSecrets", [{"secret": "s"}], "spec.imagePullSecrets[0]"),
    Refused("split.proportions", [1, 2], "give one proportion for every device"),
    Refused("split.proportions", [0, 0, 0], "at least one proportion must be above 0"),
    Refused("split.proportions", [1, -1, 1], "spec.split.proportions[1]"),
    Refused("cacheTypes.k", "q3_0", "spec.cacheTypes.k"),
    Refused("context", 0, "spec.context"),
    Refused("serving.apiKey", "secret", "put it into a Secret and name that in apiKeySecretRef", everywhere=False),
    Refused("serving.port", 0, "port 0 is for `drover up` only", everywhere=False),
    Refused("serving.nodePort", 30000, "nodePort needs type NodePort or LoadBalancer", everywhere=False),
    Refused("serving.type", "ExternalName", "spec.serving.type"),
    Refused("expose.type", "Ingress", "spec.expose.type"),
]

UNCHANGEABLE = [
    Refused("workers.0.cache.size", "2Gi", "the cache of a group cannot change while it exists"),
    Refused("workers.0.cache.enabled", False, "the cache of a group cannot change while it exists"),
    Refused("workers.0.cache.storageClassName", "fast", "the cache of a group cannot change while it exists"),
    Refused("model.storage.accessMode", "ReadWriteMany", "the class and the access mode of a volume cannot change"),
    Refused("model.storage.storageClassName", "fast", "the class and the access mode of a volume cannot change"),
]
"""Changes of an InferenceCluster that is there."""


def changed(row: Refused) -> dict[str, Any]:
    """SPEC with a row's change made."""
    made = copy.deepcopy(SPEC)
    *steps, last = row.path.split(".")
    here: Any = made
    for step in steps:
        here = here[int(step)] if step.isdigit() else here.setdefault(step, {})
    here[int(last) if last.isdigit() else last] = row.value
    return made

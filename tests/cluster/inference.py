"""InferenceClusters as tests make them, change them and watch them; small enough for several on one machine."""

import copy
import json
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from cluster.kubectl import Kubectl, Object, until
from support.chart import ROOT

SAMPLE = ROOT / "manifests/samples/cpu-pvc.yaml"
CLAIM = "models"
KINDS = "statefulset,service,poddisruptionbudget,networkpolicy,configmap,job,deployment,pod,persistentvolumeclaim"
PROMPT = "The licensor grants you"
TOKENS = 24


def sample() -> Object:
    """The sample whose model lies on a claim, just as it is."""
    body: Object = yaml.safe_load(SAMPLE.read_text())
    return body


def small(name: str, *, replicas: int = 1, memory: Any = "256MiB", **spec: Any) -> Object:
    """The sample under another name, with less of everything; `spec` replaces whole parts of it."""
    body = sample()
    body["metadata"]["name"] = name
    (group,) = body["spec"]["workers"]
    group |= {"replicas": replicas, "memory": memory, "resources": {"requests": {"cpu": "20m"}}}
    body["spec"]["context"] = 512
    body["spec"] |= spec
    return body


@dataclass(frozen=True, slots=True)
class Inference:
    """One InferenceCluster on a cluster."""

    kubectl: Kubectl
    name: str

    @property
    def body(self) -> Object:
        """The whole of it."""
        return self.kubectl.get("inferencecluster", self.name)

    @property
    def status(self) -> Object:
        """What the operator says of it; empty while it has said nothing of the spec as it is now."""
        body = self.body
        status: Object = body.get("status", {})
        return status if status.get("observedGeneration") == body["metadata"]["generation"] else {}

    def condition(self, kind: str) -> Object:
        """A condition, or an empty one."""
        found: Object = next((row for row in self.status.get("conditions", ()) if row["type"] == kind), {})
        return found

    def until(self, kind: str, status: str, reason: str = "", seconds: float = 120) -> Object:
        """Wait for a condition, and return it."""

        def reached() -> Object | None:
            row = self.condition(kind)
            return row if row.get("status") == status and reason in ("", row["reason"]) else None

        return until(f"{self.name}: {kind} is {status} {reason}", reached, seconds, lambda: self.status)

    def ready(self, seconds: float = 120) -> float:
        """Wait until it is Ready; how many seconds that took."""
        started = time.monotonic()
        self.until("Ready", "True", seconds=seconds)
        return time.monotonic() - started

    def change(self, edit: Callable[[Object], None]) -> None:
        """Apply it with a change to its spec."""
        body = self.body
        spec = copy.deepcopy(body["spec"])
        edit(spec)
        meta = {"name": self.name}
        self.kubectl.apply({"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": meta, "spec": spec})

    def objects(self) -> dict[str, Object]:
        """Everything with its label, by kind and name."""
        found = self.kubectl.items(KINDS, f"app.kubernetes.io/instance={self.name}")
        return {f"{body['kind']}/{body['metadata']['name']}": body for body in found}

    def events(self, reason: str) -> list[str]:
        """What was told about it under a reason."""
        fields = f"involvedObject.name={self.name},involvedObject.kind=InferenceCluster,reason={reason}"
        found = json.loads(self.kubectl("get", "events", f"--field-selector={fields}", "-o", "json"))
        return [event["message"] for event in found["items"]]

    def ask(self, path: str, question: Object | None = None) -> Object:
        """GET or POST to its Service, through a forwarded port."""
        with self.kubectl.forwarded(f"svc/{self.name}", 8080) as url:
            sent = None if question is None else json.dumps(question).encode()
            request = urllib.request.Request(f"{url}{path}", sent, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                said: Object = json.load(answer)
                return said

    def complete(self) -> str:
        """The greedy continuation of the prompt by its OpenAI API."""
        said = self.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0})
        return str(said["choices"][0]["text"])


@dataclass(frozen=True)
class Bad:
    """A spec that cannot come true, the condition it ends in, and words of its message."""

    body: Object
    condition: str
    reason: str
    words: tuple[str, ...]

    def says(self, kubectl: Kubectl, seconds: float = 180) -> None:
        """Wait until its status says what is wrong, and why it is not Ready; see that there is an event of it."""
        name = self.body["metadata"]["name"]
        made = Inference(kubectl, name)

        def reached() -> Object | None:
            found, ready = made.condition(self.condition), made.condition("Ready")
            states = [(said.get("status"), said.get("reason")) for said in (found, ready)]
            told = states == [("False", self.reason)] * 2 and found["message"] in ready["message"]
            return found if told and all(words in found["message"] for words in self.words) else None

        said = until(f"{name} says so", reached, seconds, lambda: made.status)
        print(f"{name}: {said['message']}")
        assert any(said["message"][:40] in line for line in made.events(self.reason))
        assert made.condition("Serving")["status"] == "False"


def layers(status: Object) -> list[str]:
    """The layers of each worker, as the status has them."""
    return [row.get("layers", "") for row in status.get("plan", ())]

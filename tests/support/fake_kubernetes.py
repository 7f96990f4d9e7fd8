"""A small Kubernetes for tests of `reconcile`: the API server as `cluster` shows it, and the controllers behind it.

It keeps plain objects, writes managed fields as server-side apply does, refuses what is asked of it to refuse, and can
fail at any one call. `settle` is what kubelet and controllers would do meanwhile: pods appear, get ready, and end.
"""

import copy
import itertools
import json
from collections.abc import Callable
from typing import Any

from drover_operator import names
from drover_operator.errors import ExistsError, RefusedError

Manifest = dict[str, Any]

KEYS = {
    "containers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "ownerReferences": ("uid",),
}
"""Lists whose items are known by a key; ports are by number and protocol."""


class PowerCutError(Exception):
    """The operator was killed."""


class FakeKubernetes:
    """Objects by kind, namespace and name."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Manifest] = {}
        self.events: list[tuple[str, str, str]] = []
        self.calls = 0
        self.writes: list[str] = []
        self.dies_before: int | None = None
        self.dies_after: int | None = None
        self.refuse: Callable[[Manifest], str | None] = lambda manifest: None
        self.ends: dict[str, tuple[int, Manifest | str]] = {}
        self.volume = ""
        """Fingerprint of the model that serving pods find; "" for what they were told."""
        self._uids = itertools.count(1)

    # What `cluster` offers.

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        return self._call("get", lambda: copy.deepcopy(self.objects.get((kind, namespace, name))))

    def owned(self, namespace: str, name: str) -> list[Manifest]:
        def found() -> list[Manifest]:
            wanted = names.labels(name, "")
            wanted = {key: value for key, value in wanted.items() if value and "name" not in key.split("/")[-1]}
            return [
                copy.deepcopy(body)
                for (kind, where, _), body in self.objects.items()
                if where == namespace
                and kind != "InferenceCluster"
                and wanted.items() <= (body["metadata"].get("labels") or {}).items()
            ]

        return self._call("list", found)

    def make(self, manifest: Manifest) -> Manifest:
        return self._written(manifest, only_where_nothing_is=True)

    def apply(self, manifest: Manifest) -> Manifest:
        return self._written(manifest)

    def _written(self, manifest: Manifest, only_where_nothing_is: bool = False) -> Manifest:
        def act() -> Manifest:
            if only_where_nothing_is and _key(manifest) in self.objects:
                raise ExistsError(f"{manifest['kind']} {manifest['metadata']['name']}")
            self._apply(manifest)
            return copy.deepcopy(self.objects[_key(manifest)])

        made: Manifest = self._call(f"apply {manifest['kind']} {manifest['metadata']['name']}", act)
        return made

    def delete(self, body: Manifest) -> None:
        self._call(f"delete {body['kind']} {body['metadata']['name']}", lambda: self.remove(body))

    def write_status(self, body: Manifest, made: Manifest) -> Manifest:
        def write() -> Manifest:
            live = self.objects[_key(body)]
            live["status"] = json.loads(json.dumps(made))
            return copy.deepcopy(live)

        written: Manifest = self._call("status", write)
        return written

    def tell(self, body: Manifest, kind: str, reason: str, message: str) -> None:
        assert body["metadata"]["uid"]
        self._call("event", lambda: self.events.append((kind, reason, message)))

    # What users do.

    def create(self, body: Manifest) -> Manifest:
        """Put an object there as a user would."""
        body = copy.deepcopy(body)
        body["metadata"] |= {"uid": f"uid-{next(self._uids)}", "generation": 1}
        self.objects[_key(body)] = body
        return body

    def change(self, name: str, **spec: Any) -> None:
        """Change the spec of an InferenceCluster."""
        body = self.one("InferenceCluster", name)
        body["spec"] |= spec
        body["metadata"]["generation"] += 1

    def edit(self, kind: str, name: str, field: str, value: Any) -> None:
        """Change a field at the top of an object's spec by hand: it is not the operator's any more."""
        body = self.one(kind, name)
        body["spec"][field] = value
        for entry in body["metadata"]["managedFields"]:
            entry["fieldsV1"]["f:spec"].pop(f"f:{field}", None)

    def one(self, kind: str, name: str, namespace: str = "farm") -> Manifest:
        return self.objects[kind, namespace, name]

    def all(self, kind: str) -> list[Manifest]:
        return [body for key, body in self.objects.items() if key[0] == kind]

    def has(self, kind: str, name: str, namespace: str = "farm") -> bool:
        return (kind, namespace, name) in self.objects

    def remove(self, body: Manifest) -> None:
        """Delete an object and, later in the same moment, what it owns."""
        gone = self.objects.pop(_key(body), None)
        if gone is None:
            return
        for other in list(self.objects.values()):
            if any(row["uid"] == gone["metadata"]["uid"] for row in other["metadata"].get("ownerReferences") or ()):
                self.remove(other)

    # What the rest of Kubernetes does.

    def settle(self) -> None:
        """Controllers and kubelet act until nothing is left to do."""
        for kind, act in (("StatefulSet", self._stateful_set), ("Deployment", self._deployment), ("Job", self._job)):
            for body in [body for key, body in self.objects.items() if key[0] == kind]:
                act(body)

    def _stateful_set(self, body: Manifest) -> None:
        replicas, name = body["spec"]["replicas"], body["metadata"]["name"]
        revision = names.digest(body["spec"]["template"])
        wanted = {f"{name}-{index}" for index in range(replicas)}
        for pod in self._pods_of(body):
            outdated = pod["metadata"]["annotations"]["revision"] != revision
            if pod["metadata"]["name"] not in wanted or outdated:
                self.remove(pod)
        for index, pod_name in enumerate(sorted(wanted)):
            if not self.has("Pod", pod_name):
                self._pod(body, pod_name, index, revision)
        ready = sum(is_ready(pod) for pod in self._pods_of(body))
        body["status"] = {
            "observedGeneration": body["metadata"]["generation"],
            "replicas": replicas,
            "readyReplicas": ready,
            "updatedReplicas": replicas,
            "currentRevision": revision,
            "updateRevision": revision,
        }

    def _deployment(self, body: Manifest) -> None:
        replicas, name = body["spec"]["replicas"], body["metadata"]["name"]
        revision = names.digest(body["spec"]["template"])
        for pod in self._pods_of(body):
            if replicas == 0 or pod["metadata"]["annotations"]["revision"] != revision:
                self.remove(pod)
        for index in range(replicas):
            if not self.has("Pod", f"{name}-{revision}-{index}"):
                self._pod(body, f"{name}-{revision}-{index}", index, revision)
        for pod in self._pods_of(body):
            self._look_at_the_model(body, pod)
        generation = body["metadata"]["generation"]
        body["status"] = {"observedGeneration": generation, "replicas": replicas, "updatedReplicas": replicas}

    def _look_at_the_model(self, deployment: Manifest, pod: Manifest) -> None:
        """A coordinator that starts ends with status 4 if the model is not the one it was told."""
        told = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
        if self.volume and "--fingerprint" in told and told[told.index("--fingerprint") + 1] != self.volume:
            ended = {"terminated": {"exitCode": 4, "message": "drover: error: another model"}}
            pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
            pod["status"]["containerStatuses"] = [
                {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended, "ready": False}
            ]

    def _job(self, body: Manifest) -> None:
        name = body["metadata"]["name"]
        if body.get("status", {}).get("conditions") or name not in self.ends:
            if not self._pods_of(body):
                self._pod(body, f"{name}-a", 0, "", ready=True)
            return
        code, words = self.ends[name]
        if not self._pods_of(body):
            self._pod(body, f"{name}-a", 0, "")
        (pod,) = self._pods_of(body)
        message = words if isinstance(words, str) else json.dumps(words)
        pod["status"] |= {
            "phase": "Failed" if code else "Succeeded",
            "conditions": [],
            "containerStatuses": [{"state": {"terminated": {"exitCode": code, "message": message}}}],
        }
        kind = "Failed" if code else "Complete"
        body["status"] = {"conditions": [{"type": kind, "status": "True", "message": "BackoffLimitExceeded"}]}

    def _pod(self, owner: Manifest, name: str, index: int, revision: str, ready: bool = True) -> None:
        template = owner["spec"]["template"]
        uid = f"uid-{next(self._uids)}"
        metadata = owner["metadata"]
        self.objects["Pod", metadata["namespace"], name] = {
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": metadata["namespace"],
                "uid": uid,
                "labels": template["metadata"]["labels"],
                "annotations": {**template["metadata"].get("annotations", {}), "revision": revision},
                "ownerReferences": [{"kind": owner["kind"], "uid": metadata["uid"], "controller": True}],
            },
            "status": {
                "phase": "Running",
                "podIP": f"10.0.0.{index + 1}",
                "hostIP": "192.168.0.9",
                "conditions": [{"type": "Ready", "status": str(ready)}],
            },
        }

    def _pods_of(self, owner: Manifest) -> list[Manifest]:
        uid = owner["metadata"]["uid"]
        pods = [body for key, body in self.objects.items() if key[0] == "Pod"]
        return [pod for pod in pods if any(row["uid"] == uid for row in pod["metadata"]["ownerReferences"])]

    # Inside.

    def _call(self, what: str, act: Callable[[], Any]) -> Any:
        self.calls += 1
        if self.dies_before == self.calls:
            raise PowerCutError(what)
        result = act()
        if what not in ("get", "list"):
            self.writes.append(what)
        if self.dies_after == self.calls:
            raise PowerCutError(what)
        return result

    def _apply(self, manifest: Manifest) -> None:
        if why := self.refuse(manifest):
            raise RefusedError(f"{manifest['kind']} {manifest['metadata']['name']}: {why}")
        key = _key(manifest)
        made = json.loads(json.dumps(manifest))
        live = self.objects.get(key)
        fields = {name: part for name, part in made.items() if name not in ("apiVersion", "kind")}
        fields["metadata"] = {k: v for k, v in made["metadata"].items() if k not in ("name", "namespace")}
        entry = {"manager": "drover", "operation": "Apply", "fieldsV1": managed(fields, made["kind"])}
        made["metadata"]["managedFields"] = [entry]
        if live is None:
            made["metadata"] |= {"uid": f"uid-{next(self._uids)}", "generation": 1}
        else:
            changed = live.get("spec") != made.get("spec")
            generation = live["metadata"]["generation"] + changed
            made["metadata"] |= {"uid": live["metadata"]["uid"], "generation": generation}
            made |= {"status": live["status"]} if "status" in live else {}
        self.objects[key] = made


def is_ready(pod: Manifest) -> bool:
    return any(row["type"] == "Ready" and row["status"] == "True" for row in pod["status"]["conditions"])


def managed(value: Any, parent: str) -> Manifest:
    """The set of fields of a value, as the API server writes it down; lists without known keys are whole."""
    if isinstance(value, dict) and parent not in ("selector", "matchLabels"):
        return {f"f:{name}": managed(part, name) for name, part in value.items()}
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return {}
    keys = KEYS.get(parent, ())
    if parent == "ports":
        keys = ("containerPort" if "containerPort" in value[0] else "port", "protocol")
    named = [(json.dumps({key: item[key] for key in keys}), item) for item in value if keys]
    return {f"k:{name}": {".": {}} | managed(item, parent) for name, item in named}


def _key(body: Manifest) -> tuple[str, str, str]:
    return body["kind"], body["metadata"]["namespace"], body["metadata"]["name"]

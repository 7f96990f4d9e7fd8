"""Pods that tests make by hand: hardened as the operator makes them, so that the `restricted` level admits them."""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import volumes
from cluster.kubectl import Kubectl, Object

USER = 10001
HARDENED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
POD_HARDENED = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster with images on it."""

    kubectl: Kubectl
    ours: bool
    """Whether it is the node of this run, where a test may do as it likes."""
    worker_image: str
    operator_image: str
    stock_image: str


@contextmanager
def space(cluster: Cluster, words: str) -> Iterator[Kubectl]:
    """A namespace of its own, named after some words."""
    if cluster.ours:
        volumes.recycle()
    word = re.sub(r"[^a-z0-9]+", "-", words)[:30].strip("-")
    name = f"{word}-{secrets.token_hex(3)}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted", "drover.dev/tests": "true"}
    cluster.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    yield cluster.kubectl.within(name)
    cluster.kubectl.delete("namespace", name, wait=False)


def container(name: str, image: str, command: Sequence[str], mounts: Mapping[str, str], **more: Any) -> Object:
    """A container whose root is read-only; `mounts` is volume -> folder, and /tmp is always there."""
    places = [{"name": volume, "mountPath": where} for volume, where in {**mounts, "tmp": "/tmp"}.items()]
    return {
        "name": name,
        "image": image,
        "command": list(command),
        "securityContext": HARDENED,
        "volumeMounts": places,
        **more,
    }


def pod_spec(*containers: Object, claims: Mapping[str, str] | None = None, **more: Any) -> Object:
    """A pod of these containers; `claims` is volume -> claim."""
    volumes = [{"name": name, "persistentVolumeClaim": {"claimName": claim}} for name, claim in (claims or {}).items()]
    return {
        "securityContext": POD_HARDENED,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 5,
        "containers": list(containers),
        "volumes": [*volumes, {"name": "tmp", "emptyDir": {}}],
        **more,
    }


def claim(name: str, size: str = "1Gi") -> Object:
    """A claim of the default storage class."""
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": claim_spec(size)}


def claim_spec(size: str) -> Object:
    """What a claim of the default storage class asks for."""
    return {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}


@dataclass(frozen=True, slots=True)
class Upload:
    """Files of this machine into a claim, through a pod that has it mounted for so long."""

    kubectl: Kubectl
    image: str

    def __call__(self, file: Path, claim_name: str, size: str = "1Gi") -> None:
        """Make the claim if need be and move the file, once it is whole, to its place in the top folder."""
        pod = f"upload-to-{claim_name}"
        waiting = container("upload", self.image, ["sleep", "3600"], {"data": "/data"})
        meta = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod}}
        self.kubectl.apply(
            claim(claim_name, size),
            {**meta, "spec": pod_spec(waiting, claims={"data": claim_name}, terminationGracePeriodSeconds=0)},
        )
        self.kubectl.wait(f"pod/{pod}", "condition=Ready")
        place = f"cd /data && cat > .{file.name}.part && mv .{file.name}.part {file.name}"
        self.kubectl.execute(pod, "sh", "-c", place, stdin=file.read_bytes())
        self.kubectl.delete("pod", pod)

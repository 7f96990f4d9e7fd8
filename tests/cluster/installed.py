"""The operator on a cluster, as a user installs it: by helm, from the chart of this checkout."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import programs
from cluster.kubectl import Kubectl, Object, until
from cluster.workloads import Cluster
from drover_operator import crd

CRD = crd.definition()["metadata"]["name"]
PODS = "app.kubernetes.io/name=drover,app.kubernetes.io/component=operator"


def helm(kubectl: Kubectl, verb: str, *arguments: str) -> str:
    """Run helm for the release `drover` of the namespace; returns what it printed."""
    command = [str(programs.helm()), verb, "drover", *arguments, "--namespace", kubectl.namespace]
    done = subprocess.run(command, env=kubectl.env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def values(cluster: Cluster, folder: Path, **more: Any) -> list[str]:
    """Flags for helm: the images of the run, and what else is to be set."""
    repository, _, tag = cluster.operator_image.rpartition(":")
    image = {"repository": repository, "tag": tag, "pullPolicy": "Never" if cluster.ours else "IfNotPresent"}
    repository, _, tag = cluster.worker_image.rpartition(":")
    path = folder / "values.yaml"
    path.write_text(json.dumps({"image": image, "workerImage": {"repository": repository, "tag": tag}, **more}))
    return ["--values", str(path), "--wait", "--timeout", "180s"]


@dataclass(frozen=True, slots=True)
class Operator:
    """The installed operator; `kubectl` is in its namespace."""

    kubectl: Kubectl

    @property
    def pod(self) -> Object:
        """Its one pod."""
        (pod,) = [pod for pod in self.kubectl.items("pods", PODS) if "deletionTimestamp" not in pod["metadata"]]
        return pod

    @property
    def restarts(self) -> int:
        """How often its container has ended by itself."""
        (container,) = self.pod["status"]["containerStatuses"]
        count: int = container["restartCount"]
        return count

    @property
    def log(self) -> str:
        """What the pod has printed."""
        return self.kubectl.logs(self.pod["metadata"]["name"])

    def kill(self) -> None:
        """End it as SIGKILL does, whatever it is at; another pod takes its place."""
        name = self.pod["metadata"]["name"]
        self.kubectl("delete", "pod", name, "--force", "--grace-period=0", "--wait=false")

    def back(self) -> None:
        """Wait until one is there and Ready."""
        until("the operator is back", lambda: self.pod["status"].get("containerStatuses", [{}])[0].get("ready"))

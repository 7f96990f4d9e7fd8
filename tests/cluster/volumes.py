"""Volumes that pods may claim: folders of the node, known to it as local volumes made beforehand.

The default class has many; `drover-tiny` has few, each a file system of 16 MiB whatever it says: a disk that gets full.
"""

import json
import shutil
from pathlib import Path

from cluster import state
from cluster.programs import kubectl, run

CLASS, TINY = "drover-local", "drover-tiny"
COUNT = {CLASS: 64, TINY: 4}
SIZE = {CLASS: "100Gi", TINY: "1Gi"}


def make() -> None:
    """Make classes and volumes; a claim is bound when a pod wants it."""
    objects: list[dict[str, object]] = []
    for name, count in COUNT.items():
        default = {"storageclass.kubernetes.io/is-default-class": "true"} if name == CLASS else {}
        objects.append(
            {
                "apiVersion": "storage.k8s.io/v1",
                "kind": "StorageClass",
                "metadata": {"name": name, "annotations": default},
                "provisioner": "kubernetes.io/no-provisioner",
                "volumeBindingMode": "WaitForFirstConsumer",
            }
        )
        for number in range(count):
            folder = _folder(f"{name}-{number}")
            folder.mkdir(parents=True)
            if name == TINY:
                run("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder)
            objects.append(_volume(name, f"{name}-{number}"))
    _kubectl("create", objects)


def recycle() -> None:
    """Empty the volumes whose claims are gone and offer them again."""
    listed = json.loads(run(kubectl(), f"--kubeconfig={state.place()}/admin.kubeconfig", "get", "pv", "-o", "json"))
    for volume in listed["items"]:
        if volume["status"]["phase"] == "Released":
            for path in _folder(volume["metadata"]["name"]).iterdir():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            _kubectl("replace", [_volume(volume["spec"]["storageClassName"], volume["metadata"]["name"])])


def _volume(storage_class: str, name: str) -> dict[str, object]:
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["node"]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "storageClassName": storage_class,
            "capacity": {"storage": SIZE[storage_class]},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "local": {"path": str(_folder(name))},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        },
    }


def _folder(name: str) -> Path:
    return state.place() / "volumes" / name


def _kubectl(verb: str, objects: list[dict[str, object]]) -> None:
    file = state.write(f"{verb}.json", {"apiVersion": "v1", "kind": "List", "items": objects})
    run(kubectl(), f"--kubeconfig={state.place()}/admin.kubeconfig", verb, "-f", file)

"""What the API server last said about objects of ours, kept from what is watched, so that a cycle need not list them.

It is no memory of the operator's own: it begins empty with every start, is filled before the first cycle, and what we
write goes into it with the API server's answer, so that a cycle sees what the one before it did. Because a watch can
miss that an object went, each cluster is listed afresh now and then. Objects are kept as text: a thousand clusters
have ten thousand of them.
"""

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from drover.spec import KIND
from drover_operator import names
from drover_operator.target import Manifest

AFRESH = 600.0
"""Seconds after which a cluster that is worked on is listed again."""

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Kept:
    version: int
    uid: str
    text: str


class Mirror:
    """Objects by cluster; any thread may call."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._objects: dict[Key, dict[tuple[str, str], _Kept]] = {}
        self._listed: dict[Key, float] = {}
        self._began = clock()
        self._lock = threading.Lock()

    def put(self, kind: str, body: Manifest) -> None:
        """An object as it is now; one that is older than what is known is passed over."""
        key = cluster_of(body)
        if key is None:
            return
        made = _Kept(_version(body), body["metadata"]["uid"], _text(kind, body))
        with self._lock:
            known = self._objects.setdefault(key, {})
            place = (kind, body["metadata"]["name"])
            if place not in known or known[place].version <= made.version:
                known[place] = made

    def drop(self, kind: str, body: Manifest) -> None:
        """An object is gone; another one of its name stays."""
        key = cluster_of(body)
        if key is None:
            return
        with self._lock:
            known = self._objects.get(key, {})
            place = (kind, body["metadata"]["name"])
            if place in known and known[place].uid == body["metadata"]["uid"]:
                del known[place]
            if not known:
                self._objects.pop(key, None)
                self._listed.pop(key, None)

    def owned(self, key: Key) -> list[Manifest] | None:
        """Objects of a cluster; None if it is time to list them."""
        with self._lock:
            if self._clock() - self._listed.get(key, self._began) > AFRESH and key in self._objects:
                return None
            return [json.loads(kept.text) for kept in self._objects.get(key, {}).values()]

    def replace(self, key: Key, bodies: Iterable[Manifest]) -> None:
        """All objects of a cluster, as they were just listed."""
        made = {
            (body["kind"], body["metadata"]["name"]): _Kept(
                _version(body), body["metadata"]["uid"], _text(body["kind"], body)
            )
            for body in bodies
        }
        with self._lock:
            self._objects[key] = made
            self._listed[key] = self._clock()


class Source(Protocol):
    """The API server itself."""

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """One object."""

    def owned(self, namespace: str, name: str) -> list[Manifest]:
        """All objects with the labels of an InferenceCluster."""

    def apply(self, manifest: Manifest) -> Manifest:
        """Make an object what the manifest says; what it is then."""

    def delete(self, body: Manifest) -> None:
        """Remove an object, and what it owns."""

    def write_status(self, body: Manifest, made: Manifest) -> None:
        """Replace the status of an InferenceCluster."""

    def tell(self, body: Manifest, kind: str, reason: str, message: str) -> None:
        """An event about an InferenceCluster."""


class Mirrored:
    """The API server for `reconcile`: lists come from the mirror, all else goes through."""

    def __init__(self, source: Source, mirror: Mirror) -> None:
        self._source = source
        self._mirror = mirror
        self.get = source.get
        self.write_status = source.write_status
        self.tell = source.tell

    def owned(self, namespace: str, name: str) -> list[Manifest]:
        """All objects with the labels of an InferenceCluster."""
        found = self._mirror.owned((namespace, name))
        if found is None:
            found = self._source.owned(namespace, name)
            self._mirror.replace((namespace, name), found)
        return found

    def apply(self, manifest: Manifest) -> Manifest:
        """Make an object what the manifest says."""
        made = self._source.apply(manifest)
        self._mirror.put(manifest["kind"], made)
        return made

    def delete(self, body: Manifest) -> None:
        """Remove an object, and what it owns."""
        self._source.delete(body)
        self._mirror.drop(body["kind"], body)


def cluster_of(body: Manifest) -> Key | None:
    """Namespace and name of the InferenceCluster that an object belongs to: its owner, or what its labels say."""
    metadata = body["metadata"]
    for owner in metadata.get("ownerReferences") or ():
        if owner.get("kind") == KIND and owner.get("controller"):
            return metadata["namespace"], owner["name"]
    labels = metadata.get("labels") or {}
    name = names.of(labels)[0] if names.MANAGED.items() <= labels.items() else ""
    return (metadata["namespace"], name) if name else None


def _text(kind: str, body: Manifest) -> str:
    """An object without what others manage of it."""
    metadata = dict(body["metadata"])
    ours = [entry for entry in metadata.pop("managedFields", None) or () if entry.get("manager") == names.MANAGER]
    return json.dumps({**body, "kind": kind, "metadata": metadata | {"managedFields": ours}}, separators=(",", ":"))


def _version(body: Manifest) -> int:
    text = body["metadata"].get("resourceVersion") or "0"
    return int(text) if text.isdigit() else 0

"""What the API server last said about InferenceClusters and objects of theirs, kept from what is watched, so that a
cycle need not ask for them.

It is no memory of the operator's own: it begins empty with every start, is filled before the first cycle, and what we
write goes into it with the API server's answer, so that a cycle sees what the one before it did. Because a watch can
miss that an object went, an InferenceCluster that was not heard of for a while is asked for, and its objects are
listed afresh now and then. Objects are kept as text: a thousand clusters have ten thousand of them.
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
"""Seconds after which the objects of a cluster that is worked on are listed again."""
HEARD = 30.0
"""Seconds for which an InferenceCluster is taken to be as it was last heard of."""
MOST_GONE = 10_000
"""Objects that are remembered to be gone, so that a late answer does not bring them back."""

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Kept:
    version: int
    uid: str
    text: str
    heard: float = 0.0


class Mirror:
    """Objects by cluster; any thread may call."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._clusters: dict[Key, _Kept] = {}
        self._objects: dict[Key, dict[tuple[str, str], _Kept]] = {}
        self._listed: dict[Key, float] = {}
        self._gone: dict[str, int] = {}
        self._began = clock()
        self._lock = threading.Lock()

    def put(self, kind: str, body: Manifest) -> bool:
        """An object as it is now; whether that was news. What is nobody's, or older than what is known, is not kept."""
        if kind != KIND and cluster_of(body) is None:
            return False
        made = _Kept(_version(body), body["metadata"]["uid"], _text(kind, body), self._clock())
        with self._lock:
            known, place = self._where(kind, body)
            before = known.get(place)
            if made.version <= self._gone.get(made.uid, -1) or (before is not None and before.version > made.version):
                return False
            known[place] = made
            return before is None or (before.version, before.text) != (made.version, made.text)

    def drop(self, kind: str, body: Manifest) -> None:
        """An object was deleted, and is not to be counted on; another one of its name stays."""
        with self._lock:
            known, place = self._where(kind, body)
            if place in known and known[place].uid == body["metadata"]["uid"]:
                del known[place]
            owner = cluster_of(body)
            if owner is not None and not self._objects.get(owner):
                self._objects.pop(owner, None)
                self._listed.pop(owner, None)

    def gone(self, kind: str, body: Manifest) -> None:
        """An object went, or lost our label: an answer that is older does not bring it back."""
        with self._lock:
            self._gone[body["metadata"]["uid"]] = _version(body)
            if len(self._gone) > MOST_GONE:
                del self._gone[next(iter(self._gone))]
        self.drop(kind, body)

    def _where(self, kind: str, body: Manifest) -> tuple[dict[Key, _Kept], Key]:
        """Where an object is kept; nowhere if it is nobody's."""
        metadata = body["metadata"]
        if kind == KIND:
            return self._clusters, (metadata["namespace"], metadata["name"])
        owner = cluster_of(body)
        known = {} if owner is None else self._objects.setdefault(owner, {})
        return known, (kind, metadata["name"])

    def cluster(self, key: Key) -> Manifest | None:
        """An InferenceCluster; None if it is time to ask for it."""
        with self._lock:
            kept = self._clusters.get(key)
        if kept is None or self._clock() - kept.heard > HEARD:
            return None
        body: Manifest = json.loads(kept.text)
        return body

    def owned(self, key: Key) -> list[Manifest] | None:
        """Objects of a cluster; None if it is time to list them."""
        with self._lock:
            if self._clock() - self._listed.get(key, self._began) > AFRESH and key in self._objects:
                return None
            texts = [kept.text for kept in self._objects.get(key, {}).values()]
        return [json.loads(text) for text in texts]

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

    def lacks(self, uids: Iterable[str]) -> set[str]:
        """Those of some objects that are neither known nor known to be gone."""
        with self._lock:
            known = {kept.uid for kept in self._clusters.values()}
            known |= {kept.uid for objects in self._objects.values() for kept in objects.values()}
            return {uid for uid in uids if uid not in known and uid not in self._gone}

    def forget(self, key: Key) -> None:
        """There is no InferenceCluster of this name."""
        with self._lock:
            self._clusters.pop(key, None)


class Source(Protocol):
    """The API server itself."""

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """One object."""

    def owned(self, namespace: str, name: str) -> list[Manifest]:
        """All objects with the labels of an InferenceCluster."""

    def make(self, manifest: Manifest) -> Manifest:
        """Make an object where there is none; what it is then."""

    def apply(self, manifest: Manifest) -> Manifest:
        """Make an object what the manifest says; what it is then."""

    def delete(self, body: Manifest) -> None:
        """Remove an object, and what it owns."""

    def write_status(self, body: Manifest, made: Manifest) -> Manifest | None:
        """Replace the status of an InferenceCluster; what it is then."""

    def tell(self, body: Manifest, kind: str, reason: str, message: str) -> None:
        """An event about an InferenceCluster."""


class Mirrored:
    """The API server for `reconcile`: InferenceClusters and lists come from the mirror, all else goes through."""

    def __init__(self, source: Source, mirror: Mirror) -> None:
        self._source = source
        self._mirror = mirror
        self.tell = source.tell

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """One object."""
        if kind != KIND:
            return self._source.get(kind, namespace, name)
        key = (namespace, name)
        found = self._mirror.cluster(key)
        if found is None:
            asked = self._source.get(kind, namespace, name)
            if asked is None:
                self._mirror.forget(key)
                return None
            self._mirror.put(kind, asked)
            found = self._mirror.cluster(key)
        return found

    def owned(self, namespace: str, name: str) -> list[Manifest]:
        """All objects with the labels of an InferenceCluster."""
        found = self._mirror.owned((namespace, name))
        if found is None:
            found = self._source.owned(namespace, name)
            self._mirror.replace((namespace, name), found)
        return found

    def make(self, manifest: Manifest) -> Manifest:
        """Make an object where there is none."""
        made = self._source.make(manifest)
        self._mirror.put(manifest["kind"], made)
        return made

    def apply(self, manifest: Manifest) -> Manifest:
        """Make an object what the manifest says."""
        made = self._source.apply(manifest)
        self._mirror.put(manifest["kind"], made)
        return made

    def delete(self, body: Manifest) -> None:
        """Remove an object, and what it owns."""
        self._source.delete(body)
        self._mirror.drop(body["kind"], body)

    def write_status(self, body: Manifest, made: Manifest) -> None:
        """Replace the status of an InferenceCluster."""
        written = self._source.write_status(body, made)
        if written is not None:
            self._mirror.put(KIND, written)


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
    """An object without what others manage of it; of an InferenceCluster nobody asks who manages what."""
    metadata = dict(body["metadata"])
    fields = metadata.pop("managedFields", None) or ()
    ours = [entry for entry in fields if entry.get("manager") == names.MANAGER and kind != KIND]
    return json.dumps({**body, "kind": kind, "metadata": metadata | {"managedFields": ours}}, separators=(",", ":"))


def _version(body: Manifest) -> int:
    text = body["metadata"].get("resourceVersion") or "0"
    return int(text) if text.isdigit() else 0

"""What keeps a pod from running: its status -> a reason, and a sentence that says what to do. Pure."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from drover_operator.target import Manifest

KILLED = 137
CUT_SHORT = 135
"""Of a process that read a mapped file behind its end (SIGBUS)."""
LONGEST = 400


@dataclass(frozen=True, slots=True)
class Trouble:
    """One word for programs, one sentence for people."""

    reason: str
    message: str


_UNSCHEDULABLE = (
    (
        r"Insufficient [^ ,]+/",
        "DeviceMissing",
        "no node has a free GPU: add one, install its device plugin, or lower replicas or devicesPerWorker",
    ),
    (
        r"persistentvolumeclaim|PersistentVolume|volume",
        "VolumeNotBound",
        "its volume cannot be bound: check storageClassName, size and accessMode, and that the class has a provisioner",
    ),
    (
        r"Insufficient memory",
        "Unschedulable",
        "no node has enough free memory: lower memory or resources, or add a node",
    ),
    (r"Insufficient cpu", "Unschedulable", "no node has enough free processors: lower resources, or add a node"),
    (r"taint", "Unschedulable", "every node that would do has a taint: add tolerations to the group"),
    (r"affinity|selector", "Unschedulable", "no node matches nodeSelector and affinity of the group"),
)
"""What the scheduler says -> reason and what to do; the first that is found counts."""

_WAITING = {
    "ErrImagePull": ("ImagePullFailed", "check the image's name, and that the nodes may pull it"),
    "ImagePullBackOff": ("ImagePullFailed", "check the image's name, and that the nodes may pull it"),
    "InvalidImageName": ("ImagePullFailed", "the image's name is not valid"),
    "ErrImageNeverPull": ("ImagePullFailed", "the image is not on the node, and it may not be pulled"),
    "CreateContainerConfigError": ("CannotStart", "a Secret or ConfigMap that it names is missing"),
    "CreateContainerError": ("CannotStart", "see kubectl describe pod"),
    "RunContainerError": ("CannotStart", "see kubectl describe pod"),
}


def of(pod: Manifest) -> Trouble | None:
    """What keeps a pod from running, if anything does."""
    name = pod["metadata"]["name"]
    return next(_found(name, pod), None)


def ready(pod: Manifest) -> bool:
    """Whether a pod takes work."""
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def ready_since(pod: Manifest) -> str:
    """When a pod began to take work, or stopped; "" if that is not known."""
    conditions = pod.get("status", {}).get("conditions") or ()
    return next((row.get("lastTransitionTime") or "" for row in conditions if row["type"] == "Ready"), "")


def started(pod: Manifest) -> str:
    """When the container that runs in a pod was started; "" if none does."""
    running = [(row.get("state") or {}).get("running") for row in pod.get("status", {}).get("containerStatuses") or ()]
    return max((state.get("startedAt") or "" for state in running if state), default="")


def last_words(pod: Manifest) -> str:
    """What the pod's container left as its termination message, the last time it ended."""
    ended = _last_end(pod)
    if ended is None:
        return ""
    text = "" if ended.get("exitCode") == CUT_SHORT else (ended.get("message") or "").strip()
    return text or _ending(ended)


def exit_status(pod: Manifest) -> int | None:
    """The exit status of the pod's container, the last time it ended."""
    return (_last_end(pod) or {}).get("exitCode")


def _last_end(pod: Manifest) -> Manifest | None:
    for status in pod.get("status", {}).get("containerStatuses") or ():
        for state in (status.get("state") or {}, status.get("lastState") or {}):
            if "terminated" in state:
                ended: Manifest = state["terminated"]
                return ended
    return None


def _found(name: str, pod: Manifest) -> Iterator[Trouble]:
    status = pod.get("status", {})
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            yield _unschedulable(name, condition.get("message") or condition.get("reason") or "")
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in _WAITING:
            reason, advice = _WAITING[waiting["reason"]]
            said = _short(waiting.get("message") or waiting["reason"])
            yield Trouble(reason, f"{name}: {said}; {advice}")
        ended = (container.get("lastState") or {}).get("terminated") or {}
        if ended and not container.get("ready"):
            words = _short(ended.get("message") or "") or "no last words"
            count = container.get("restartCount", 0)
            yield Trouble("Crashing", f"{name}: {_ending(ended)}, {_times(count)} so far: {words}")
    if status.get("phase") == "Failed":
        yield Trouble("PodFailed", f"{name}: {_short(status.get('message') or status.get('reason') or 'it failed')}")


def _unschedulable(name: str, said: str) -> Trouble:
    for pattern, reason, advice in _UNSCHEDULABLE:
        if re.search(pattern, said):
            return Trouble(reason, f"{name} cannot be placed: {advice} ({_short(said)})")
    return Trouble("Unschedulable", f"{name} cannot be placed: {_short(said)}")


def _ending(terminated: Manifest) -> str:
    code = terminated.get("exitCode")
    if terminated.get("reason") == "OOMKilled":
        return "it was killed for using more memory than resources.limits.memory allows"
    if code == KILLED:
        return "it was killed (SIGKILL)"
    if code == CUT_SHORT:
        return (
            "it was killed (SIGBUS): a file was cut short while it was read; move a new file into the old one's place"
        )
    return f"it ended with exit status {code}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _short(text: str) -> str:
    """The last line, cut where it is long: crashes say what is wrong at their end."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    return last if len(last) <= LONGEST else last[: LONGEST - 1] + "…"

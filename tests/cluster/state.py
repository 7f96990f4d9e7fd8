"""The running node as files: one folder that holds its state, its logs and its settings, and goes when it goes.

Also how its processes are started: in the network namespace, in a session of their own, output in a log each.
"""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from cluster.cache import ClusterUnavailableError, folder
from cluster.programs import kube

NETNS = "drover-kube"
LOCK = "/run/drover-kube"
"""One node at a time on a machine, whichever cache it comes from."""
NODE, HOST, LINK_BITS = "10.250.0.1", "10.250.0.2", 30
"""The two ends of the link between the node and this machine."""
EVERYTHING, PODS, SERVICES = "10.250.0.0/16", "10.250.1.0/24", "10.250.64.0/18"
LONGEST_SOCKET = 107
"""Bytes in the path of a unix socket; the kubelet adds up to 50 to ours."""


def place() -> Path:
    """The folder of the running node; it may not be there."""
    path = folder() / "state"
    if len(str(path)) + 50 > LONGEST_SOCKET:
        raise ClusterUnavailableError(
            f"{path}: too long a path for sockets; name a shorter one in DROVER_CLUSTER_CACHE"
        )
    return path


def write(name: str, content: object) -> Path:
    """Write a settings file of the node: text as it is, everything else as JSON."""
    path = place() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    path.chmod(0o600)
    return path


def start(part: str, *flags: str) -> None:
    """Start a part of Kubernetes."""
    launch(part, str(kube()), part, *flags)


def launch(name: str, *argv: str) -> None:
    """Start a program that stays, as nobody's child: it ends when the node does, not when we do."""
    with (place() / f"{name}.log").open("wb") as log:
        command = ["setsid", "--fork", *inside(*argv)]
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)


def inside(*argv: str) -> list[str]:
    """The command line in the node's network; `ip netns exec` would hide /sys/fs/cgroup, which the kubelet needs."""
    return ["nsenter", f"--net=/run/netns/{NETNS}", *argv]


def until(what: str, holds: Callable[[], bool], seconds: float = 120) -> None:
    """Wait until something holds; give up with the last words of the part that is to blame."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            _give_up(f"waited {seconds:.0f} s until {what}")
        time.sleep(0.05)


def _give_up(why: str) -> NoReturn:
    newest = max(place().glob("*.log"), key=lambda path: path.stat().st_mtime, default=None)
    last = newest.read_text(errors="replace").strip().splitlines()[-1:] if newest else []
    raise ClusterUnavailableError(f"{why}; see the logs in {place()}; the newest ends: {''.join(last)}")

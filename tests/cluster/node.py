"""A real one-node Kubernetes for tests: unmodified components in a network namespace of this machine.

    PYTHONPATH=tests python -m cluster.node build        its programs, once (5 minutes); kept in the cache folder
    … up                                                 a fresh node (10 seconds), with volumes to claim
    … load FILE.tar …                                    images into it (docker-archive)
    … kubeconfig                                         the file to set KUBECONFIG to
    … down                                               all that it left, gone

Needs root and Debian; `up` first removes whatever an earlier or killed run left.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster import cgroups, control_plane, kubelet, network, programs, state, volumes
from cluster.cache import ClusterUnavailableError, locked

CACHED_RESULTS, LOG_LINKS = Path("/var/lib/cni/results"), Path("/var/log/containers")


def build() -> None:
    """Build what takes long, so that `up` does not."""
    programs.require_root()
    programs.require(programs.NODE_PROGRAMS)
    for make in (programs.kube, programs.kubectl, programs.helm, programs.pause):
        make()


def up() -> None:
    """Start a fresh node."""
    build()
    down()
    state.place().mkdir(mode=0o711)
    cgroups.make()
    network.make()
    control_plane.identities()
    control_plane.serve()
    control_plane.act()
    volumes.make()
    kubelet.begin()


def up_alone() -> None:
    """Start a fresh API server alone: no controllers, no scheduler, no kubelet, so nothing acts on what is written."""
    programs.require_root()
    programs.require(programs.API_PROGRAMS)
    programs.kube()
    down()
    state.place().mkdir(mode=0o711)
    network.make()
    control_plane.identities()
    control_plane.serve()


def kubeconfig() -> Path:
    """The administrator's kubeconfig, good from anywhere on this machine."""
    return state.place() / "admin.kubeconfig"


def load(*archives: str | Path) -> None:
    """Import images into the running node."""
    if not kubeconfig().exists():
        raise ClusterUnavailableError("no node is up: python -m cluster.node up")
    for archive in archives:
        kubelet.load(Path(archive))


def down() -> None:
    """End every process of the node and remove what is left of it; nothing there is worth a quiet end."""
    programs.require_root()
    deadline = time.monotonic() + 30
    while alive := network.processes() | cgroups.processes():
        cgroups.kill(alive)
        if time.monotonic() > deadline:
            raise ClusterUnavailableError(f"processes {sorted(alive)} of an earlier node do not end; end them by hand")
        time.sleep(0.05)
    where = state.place()
    _remove_traces(where)
    _unmount(where)
    network.remove()
    cgroups.remove()
    shutil.rmtree(where, ignore_errors=True)
    if where.exists():
        raise ClusterUnavailableError(f"{where}: cannot be removed; see `findmnt` and `lsof` for what holds it")


def _unmount(where: Path) -> None:
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in reversed([path for path in mounts if path.startswith(f"{where}/")]):
        subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False)


def _remove_traces(where: Path) -> None:
    """What containerd, its network plugins and the kubelet write outside the node's folder."""
    for address in where.glob("containerd/state/io.containerd.runtime.v2.task/*/*/address"):
        Path(address.read_text().strip().removeprefix("unix://")).unlink(missing_ok=True)
    traces = list(CACHED_RESULTS.glob(f"{kubelet.NETWORK}-*"))
    traces += [CACHED_RESULTS / f"cni-loopback-{path.name.split('-')[-2]}-lo" for path in traces]
    links = LOG_LINKS.iterdir() if LOG_LINKS.exists() else ()
    traces += [link for link in links if link.is_symlink() and link.readlink().is_relative_to(where)]
    for path in traces:
        path.unlink(missing_ok=True)


def _say_up() -> None:
    up()
    print(f"export KUBECONFIG={kubeconfig()}")


VERBS: dict[str, Callable[..., None]] = {
    "build": build,
    "up": _say_up,
    "load": load,
    "kubeconfig": lambda: print(kubeconfig()),
    "down": down,
}


def main(arguments: Sequence[str]) -> int:
    """Do what the first argument says; returns the exit status."""
    verb, *rest = arguments or [""]
    if verb not in VERBS or (rest and verb != "load"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        if verb in ("up", "load", "down"):
            with locked(state.LOCK):
                VERBS[verb](*rest)
        else:
            VERBS[verb]()
    except ClusterUnavailableError as error:
        print(f"cluster: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

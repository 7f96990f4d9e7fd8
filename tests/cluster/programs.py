"""The programs a cluster needs: Debian's, installed when they are missing, and those built from pinned Go modules.

Nothing is downloaded but through apt and Go's own module machinery, which check what they fetch.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from cluster.cache import ClusterUnavailableError, digest, kept

SOURCES = Path(__file__).parent / "kube"
KUBERNETES = "v1.35.4"
HELM = "v3.20.2"
API_PROGRAMS = {"ip": "iproute2", "nsenter": "util-linux", "openssl": "openssl"}
NODE_PROGRAMS = {
    **API_PROGRAMS,
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
    "nft": "nftables",
}
BUILD_PROGRAMS = {"gcc": "gcc", "/usr/include/stdlib.h": "libc6-dev"}
IMAGE_PROGRAMS = {"buildah": "buildah", "debootstrap": "debootstrap"}
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/go/bin"


def require_root() -> None:
    """Raise ClusterUnavailableError unless we are root."""
    if os.geteuid() != 0:
        raise ClusterUnavailableError("a node of our own needs root; or set KUBECONFIG to use a cluster that is there")


def require(programs: Mapping[str, str]) -> None:
    """Install the packages of the programs that are missing; where that cannot be done, say which."""
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    missing = sorted({package for name, package in programs.items() if not _present(name)})
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ClusterUnavailableError(f"missing programs: install the packages {' '.join(missing)} (Debian's names)")
    run("apt-get", "update", "-qq")
    run(
        "apt-get",
        "install",
        "-y",
        "-qq",
        "--no-install-recommends",
        *missing,
        env={"DEBIAN_FRONTEND": "noninteractive"},
    )


def _present(name: str) -> bool:
    return Path(name).exists() if name.startswith("/") else shutil.which(name) is not None


def kube() -> Path:
    """The whole node in one binary (4 to 8 minutes the first time)."""

    def build(target: Path) -> None:
        version = "k8s.io/component-base/version"
        _, minor, _ = KUBERNETES.removeprefix("v").split(".")
        stamp = f"-X {version}.gitVersion={KUBERNETES} -X {version}.gitMajor=1 -X {version}.gitMinor={minor}"
        go("build", "-trimpath", "-ldflags", f"-s -w {stamp}", "-o", str(target), ".", cwd=SOURCES)

    key = digest(KUBERNETES, *(SOURCES / name for name in ("main.go", "go.mod", "go.sum")))
    return kept("kube", key, "", build)


def kubectl() -> Path:
    """kubectl of the same version: the node's binary by another name."""
    binary = kube()

    def write(target: Path) -> None:
        target.write_text(f'#!/bin/sh\nexec {binary} kubectl "$@"\n')
        target.chmod(0o755)

    return kept("kubectl", digest(str(binary)), "", write)


def helm() -> Path:
    """helm, at the one version we test with."""

    def build(target: Path) -> None:
        go("install", "-trimpath", f"helm.sh/helm/v3/cmd/helm@{HELM}", env={"GOBIN": str(target.parent)})
        (target.parent / "helm").rename(target)

    return kept("helm", digest(HELM), "", build)


def pause() -> Path:
    """The program of the container that holds a pod's namespaces."""
    source = SOURCES / "pause.c"

    def build(target: Path) -> None:
        require(BUILD_PROGRAMS)
        run("gcc", "-static", "-Os", "-s", "-o", target, source)

    return kept("pause", digest(source), "", build)


def go(*args: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
    """Run go with what it needs to build a static program."""
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    if shutil.which("go") is None:
        raise ClusterUnavailableError(
            "go not found: install Go 1.25 or newer, or set KUBECONFIG to use another cluster"
        )
    run("go", *args, cwd=cwd, env={"CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false", **(env or {})})


def run(
    *argv: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float | None = None
) -> str:
    """Run a program to its end and return what it printed; a failure is one line with the last that it said."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ClusterUnavailableError(f"{' '.join(words[:4])} … has not ended after {timeout:g} s") from None
    except OSError as error:
        raise ClusterUnavailableError(f"{words[0]}: {error.strerror}") from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        raise ClusterUnavailableError(f"{' '.join(words[:4])} … ended with {done.returncode}: {' | '.join(said[-3:])}")
    return done.stdout

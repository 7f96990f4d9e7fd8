"""The images that run on a cluster: the project's own, built by its Dockerfiles, and stock llama.cpp beside them.

    PYTHONPATH=tests python -m cluster.images build [BASE]    drover-worker and drover-operator, for people; the base
                                                              `debian` is made here, any other has to be pulled
    PYTHONPATH=tests python -m cluster.images archives        those of the end-to-end tests, as files in the cache

The tests need no registry: their base is a Debian made here, and their builder is buildah with a storage of its own in
the cache, so that a build after a change repeats only the steps that the change reaches.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import drover
from cluster import archive, programs
from cluster.cache import ClusterUnavailableError, digest, folder, kept, locked
from cluster.programs import run
from support.peer import Peer, PeerUnavailableError

ROOT = Path(__file__).parents[2]
OWN = {
    "worker": ("pyproject.toml", "requirements.lock", "LICENSE", "worker"),
    "operator": ("pyproject.toml", "requirements.lock", "LICENSE", "worker", "operator"),
}
"""What goes into each image beside its Dockerfile."""
BUILD = {"docker": ["build"], "podman": ["build"], "buildah": ["bud", "--layers", "--format=docker"]}
LOAD = {"docker": ["load", "--input"], "podman": ["load", "--input"], "buildah": ["pull"]}
LOAD_PREFIX = {"docker": "", "podman": "", "buildah": "docker-archive:"}
DEBIAN = "bookworm"
BASE_PACKAGES = "python3,python3-venv,ca-certificates"
BASE_LEFT_OUT = (
    "./dev/*", "./proc/*", "./sys/*", "./tmp/*", "./var/cache/apt/*", "./var/lib/apt/lists/*", "./var/log/*",
    "./usr/share/doc/*", "./usr/share/info/*", "./usr/share/locale/*", "./usr/share/man/*",
)  # fmt: skip
PEER_LEFT_OUT = (*BASE_LEFT_OUT, "./host/*", "./models/*", "./usr/libexec/*/llama.cpp-tests")
TRUST = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf")
"""How this machine reaches its package index; lent to a build, never kept in an image."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image of the tests: its name in a pod, and the file that holds it."""

    name: str
    archive: Path


def archives() -> list[Image]:
    """Every image the tests need, built where it is missing."""
    return [worker(), operator(), stock()]


def worker() -> Image:
    """The data plane, with kernels for this machine's CPU."""
    return _own("worker", _processor())


def operator() -> Image:
    """The control plane."""
    return _own("operator")


def stock() -> Image:
    """Stock llama.cpp of support.peer, as an image: worker, server, bench."""
    try:
        peer = Peer.install()
    except PeerUnavailableError as error:
        raise ClusterUnavailableError(str(error)) from None
    key = digest(peer.version, *PEER_LEFT_OUT, Path(archive.__file__))
    name = f"localhost/llama.cpp:{key}"
    paths = "/usr/bin:/bin:/usr/libexec/x86_64-linux-gnu/llama/bin"
    config = {"Env": [f"PATH={paths}"], "User": "65534:65534"}

    def write(target: Path) -> None:
        layer = target.with_name("layer.tar")
        _pack(layer, peer.root, PEER_LEFT_OUT)
        archive.write(target, name, layer, config)

    return Image(name, kept("image-stock", key, ".tar", write))


def base() -> Image:
    """A Debian with Python, to build on."""
    programs.require_root()
    programs.require(programs.IMAGE_PROGRAMS)
    key = digest(DEBIAN, BASE_PACKAGES, *BASE_LEFT_OUT, Path(archive.__file__))
    name = f"localhost/debian-python:{key}"

    def write(target: Path) -> None:
        root, layer = target.with_name("root"), target.with_name("layer.tar")
        run("unshare", "--mount", "debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", DEBIAN, root)
        _pack(layer, root, BASE_LEFT_OUT)
        archive.write(target, name, layer, {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8"]})

    return Image(name, kept("image-base", key, ".tar", write))


def build(base_name: str = "") -> None:
    """`make images`: with docker, podman or buildah, under the names a person expects."""
    tool = _builder()
    arguments = [] if tool == "docker" else ["--network", "host", *_trust()]
    if base_name == "debian":
        made = base()
        base_name = made.name
        subprocess.run([tool, *LOAD[tool], f"{LOAD_PREFIX[tool]}{made.archive}"], check=True)
    if base_name:
        arguments += ["--build-arg", f"BASE={base_name}"]
    for part in OWN:
        name = f"drover-{part}:{drover.__version__}"
        options = [*arguments, "-f", f"Dockerfile.{part}", "-t", name, "."]
        subprocess.run([tool, *BUILD[tool], *options], cwd=ROOT, check=True)
        print(f"built {name}")


def _builder() -> str:
    """The first builder that works: a docker without its daemon does not."""
    for tool in BUILD:
        if shutil.which(tool) and subprocess.run([tool, "version"], capture_output=True, check=False).returncode == 0:
            return tool
    raise ClusterUnavailableError(
        "no working docker, podman or buildah here: install one (docker needs its daemon too)"
    )


def _own(part: str, *more: str) -> Image:
    under = base()
    sources = [ROOT / f"Dockerfile.{part}", *(ROOT / name for name in OWN[part])]
    key = digest(under.name, *more, *sources)
    name = f"localhost/drover-{part}:{key}"

    def write(target: Path) -> None:
        with locked("buildah"):
            _buildah("rm", "--all")  # what a killed build left
            if not _buildah("images", "--quiet", "--filter", f"reference={under.name}"):
                _buildah("pull", f"docker-archive:{under.archive}")
            options = ("--layers", "--isolation=chroot", "--network=host", "--format=docker", *_trust(), *_pip_cache())
            own = ("--build-arg", f"BASE={under.name}", "-f", str(ROOT / f"Dockerfile.{part}"), "-t", name, str(ROOT))
            _buildah("bud", *options, *own)
            _buildah("push", name, f"docker-archive:{target}:{name}")
            _buildah("rmi", name)  # the file is kept; of the build, the steps that take long are

    return Image(name, kept(f"image-{part}", key, ".tar", write))


def _buildah(*args: str) -> str:
    storage = folder() / "buildah"
    return run("buildah", *args[:1], "--root", storage / "root", "--runroot", storage / "run", *args[1:]).strip()


def _trust() -> list[str]:
    return [word for path in TRUST if Path(path).exists() for word in ("-v", f"{path}:{path}:ro")]


def _pip_cache() -> list[str]:
    wheels = folder() / "pip"
    wheels.mkdir(exist_ok=True)
    return ["-v", f"{wheels}:/root/.cache/pip"]


def _pack(layer: Path, root: Path, left_out: Sequence[str]) -> None:
    excluded = [f"--exclude={pattern}" for pattern in left_out]
    run("tar", "--numeric-owner", "--sort=name", "-C", root, *excluded, "-cf", layer, ".")


def _processor() -> str:
    """What decides which kernels a CPU takes."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))


def main(arguments: Sequence[str]) -> int:
    """`build [BASE]` or `archives`; returns the exit status."""
    verb, *rest = arguments or [""]
    try:
        if verb == "build" and len(rest) < 2:
            build(*rest)
        elif verb == "archives" and not rest:
            for image in archives():
                print(image.name, image.archive)
        else:
            print(__doc__, file=sys.stderr)
            return 2
    except (ClusterUnavailableError, subprocess.CalledProcessError) as error:
        print(f"images: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

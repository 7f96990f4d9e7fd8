"""The stock llama.cpp that interop tests talk to: installed once, in a root file system of its own, and run from there.

It comes from Debian's packages and is used as it is. Mounts live in a mount namespace of the one command that needs
them, so nothing has to be cleaned up and the folder can be deleted at any time.
"""

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.processes import Running, free_port

PROTOCOL = "8.0"
DEFAULT_ROOT = Path("/var/cache/drover/peer")
PACKAGES = (
    "llama.cpp-tools",
    "llama.cpp-tools-extra",
    "llama.cpp-tests",
    "libggml0",
    "libggml0-backend-rpc",
)
TOOL_FOLDERS = ("usr/bin", "usr/libexec/*/llama/bin", "usr/libexec/*/llama.cpp-tests")
INSTALL_SECONDS = 900
ENTER = Path(__file__).with_name("enter_peer.sh")

TRIES = 5
"""Of a tool that does not always print all of its output."""


class PeerUnavailableError(Exception):
    """Why there is no stock llama.cpp to test against, in one line."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An installed stock llama.cpp that speaks our protocol."""

    root: Path
    version: str
    protocol: str
    variant: str = ""
    """The only variant of the processor backend that is there, as `haswell`; by default it takes the best of all."""

    @classmethod
    def find(cls, root: Path | None = None) -> "Peer":
        """The installed peer; raises PeerUnavailableError if there is none or it speaks another protocol."""
        root = root or configured_root()
        if not (root / "usr/bin/llama-server").exists():
            raise PeerUnavailableError(f"stock llama.cpp is not installed in {root}: run `make test` as root on Debian")
        if os.geteuid() != 0:
            raise PeerUnavailableError("running the stock llama.cpp needs root (chroot)")
        peer = cls(root, _installed_version(root), _spoken_protocol(root))
        if not peer.protocol.startswith(PROTOCOL + "."):
            raise PeerUnavailableError(
                f"stock llama.cpp {peer.version} speaks RPC protocol {peer.protocol}; these tests need {PROTOCOL}"
            )
        return peer

    @classmethod
    def install(cls, root: Path | None = None) -> "Peer":
        """The peer, installed first if need be (one to two minutes); raises PeerUnavailableError if that fails."""
        root = root or configured_root()
        if not (root / "usr/bin/llama-server").exists():
            _require_debian_root()
            with _locked(root):
                if not root.exists():
                    _build(root)
        return cls.find(root)

    def command(self, tool: str, *args: str | Path) -> list[str]:
        """The command line, on the host, that runs a tool inside; Path arguments are translated."""
        inside = [self.inside(part) if isinstance(part, Path) else part for part in args]
        # Unbuffered, so that a tool that aborts has said all it had to say.
        chosen = ("env", f"GGML_CPU_VARIANT={self.variant}") if self.variant else ()
        return [*chosen, *_enter(self.root, "stdbuf", "-o0", _tool_path(self.root, tool), *inside)]

    def inside(self, path: Path) -> str:
        """The name that a file of the host has inside."""
        return f"/host{path.resolve()}"

    def run(
        self, tool: str, *args: str | Path, timeout: float, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a tool to its end; output and errors are captured as text."""
        return subprocess.run(
            self.command(tool, *args),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env={**os.environ, **(env or {})},
            check=False,
        )

    def complete(self, *args: str | Path, timeout: float) -> subprocess.CompletedProcess[str]:
        """Run `llama-completion` until all of its text is there.

        Now and then (one run in thirty, workers or not) it ends before its last words are printed; a whole text ends
        with an empty line.
        """
        for _ in range(TRIES):
            done = self.run("llama-completion", *args, timeout=timeout)
            if done.returncode or done.stdout.endswith("\n\n"):
                break
        return done

    def start(self, log: Path, tool: str, *args: str | Path, env: Mapping[str, str] | None = None) -> Running:
        """Start a tool that keeps running; its output goes to `log`."""
        return Running(self.command(tool, *args), log, env)

    def start_worker(self, log: Path, port: int, threads: int = 1) -> Running:
        """Start the stock worker and wait for its port."""
        worker = self.start(log, "ggml-rpc-server", "-p", str(port), "-t", str(threads))
        return worker.wait_port(port, timeout=30)

    def start_server(self, log: Path, port: int, model: Path, workers: Sequence[int] = (), *options: str) -> Running:
        """Start `llama-server` on a model, alone or with all layers on these workers, and wait until it is healthy.

        Alone it must not repack weights: a worker never does, and repacked kernels round differently.
        """
        servers = ",".join(f"127.0.0.1:{worker}" for worker in workers)
        placed = ("--rpc", servers, "-ngl", "99") if workers else ("--device", "none", "--no-repack")
        fixed = ("--port", str(port), "-t", "1", "--no-ui", "-fit", "off", "-c", "1024")
        server = self.start(log, "llama-server", "-m", model, *fixed, *placed, *options)
        return server.wait_healthy(port, timeout=60)


def configured_root() -> Path:
    """The cache folder of the peer: DROVER_PEER, or the default."""
    return Path(os.environ.get("DROVER_PEER") or DEFAULT_ROOT)


def _require_debian_root() -> None:
    if os.geteuid() != 0:
        raise PeerUnavailableError("installing the stock llama.cpp needs root (debootstrap)")
    if shutil.which("debootstrap") is None and shutil.which("apt-get") is None:
        raise PeerUnavailableError("installing the stock llama.cpp needs Debian (no debootstrap, no apt-get)")


def _build(root: Path) -> None:
    """Make the root file system beside its place and rename it when it is whole."""
    if shutil.which("debootstrap") is None:
        _step("apt-get", "update")
        _step("apt-get", "install", "-y", "--no-install-recommends", "debootstrap")
    partial = Path(tempfile.mkdtemp(prefix=f"{root.name}.partial-", dir=root.parent))
    try:
        partial.chmod(0o755)
        _step("debootstrap", "--variant=minbase", "sid", str(partial))
        _step(*_enter(partial, "apt-get", "update", "-o", "Acquire::Check-Valid-Until=false"))
        _step(*_enter(partial, "apt-get", "install", "-y", "--no-install-recommends", *PACKAGES))
        _step(*_enter(partial, "apt-get", "clean"))
        partial.rename(root)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _step(*command: str) -> None:
    own = command[command.index(str(ENTER)) + 2 :] if str(ENTER) in command else command
    shown = " ".join(own[:3])
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=INSTALL_SECONDS,
            env=env,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerUnavailableError(f"installing the stock llama.cpp failed: {shown}: {error}") from None
    if done.returncode != 0:
        last = (done.stdout.strip().splitlines() or ["no output"])[-1]
        ended = f"{shown} … ended with {done.returncode}: {last}"
        raise PeerUnavailableError(f"installing the stock llama.cpp failed: {ended}")


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One installation at a time on this machine."""
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        lock = (root.parent / f"{root.name}.lock").open("w")
    except OSError as error:
        raise PeerUnavailableError(f"installing the stock llama.cpp failed: {error}") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _enter(root: Path, *command: str) -> list[str]:
    return ["unshare", "--mount", "--propagation", "private", "sh", str(ENTER), str(root), *command]


def _tool_path(root: Path, tool: str) -> str:
    for folder in TOOL_FOLDERS:
        for found in root.glob(f"{folder}/{tool}"):
            return f"/{found.relative_to(root)}"
    raise PeerUnavailableError(f"stock llama.cpp in {root} has no {tool}")


def _installed_version(root: Path) -> str:
    """Version of the ggml library, from the package database: no program is run."""
    package = ""
    for line in (root / "var/lib/dpkg/status").read_text(errors="replace").splitlines():
        key, _, value = line.partition(": ")
        if key == "Package":
            package = value
        elif key == "Version" and package == "libggml0":
            return f"ggml {value}"
    return "of unknown version"


def _spoken_protocol(root: Path) -> str:
    """Ask the stock worker itself (docs/protocol.md section 1.3)."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = _enter(root, _tool_path(root, "ggml-rpc-server"), "-p", str(port))
        try:
            with Running(command, Path(folder) / "log") as worker:
                worker.wait_port(port, timeout=30)
                with socket.create_connection(("127.0.0.1", port), timeout=10) as link:
                    link.sendall(bytes([14]) + (24).to_bytes(8, "little") + bytes(24))
                    reply = link.makefile("rb").read(11)
        except (OSError, AssertionError) as error:
            raise PeerUnavailableError(f"the stock worker does not start: {str(error).splitlines()[-1]}") from None
    return ".".join(str(part) for part in reply[8:11])


def main(arguments: Sequence[str]) -> int:
    """`install`, `status`, or `run TOOL ARGUMENT…` (files of the host are under /host there)."""
    action, *rest = arguments or ["status"]
    try:
        peer = Peer.install() if action == "install" else Peer.find()
    except PeerUnavailableError as error:
        print(error)
        return 1
    if action == "run":
        command = peer.command(*rest)
        os.execvp(command[0], command)
    print(f"stock llama.cpp in {peer.root}: {peer.version}, RPC protocol {peer.protocol}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

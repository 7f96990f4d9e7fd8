"""Builds the small library that hands an RPC server to llama.cpp's own test programs.

Those programs have no `--rpc` option; with `environment(...)` they find the worker as device RPC0.
"""

import shutil
import subprocess
from pathlib import Path

from support.peer import Peer, PeerUnavailableError

SOURCE = Path(__file__).with_name("rpc_shim.c")


def build(folder: Path) -> Path:
    """Compile the shim into `folder`; raises PeerUnavailableError if there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise PeerUnavailableError("llama.cpp's own test programs need a C compiler (gcc) for a shim of a dozen lines")
    library = folder / "rpc_shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def environment(peer: Peer, library: Path, port: int) -> dict[str, str]:
    """Environment variables under which a program sees 127.0.0.1:`port` as RPC0."""
    backend = next(peer.root.glob("usr/lib/*/ggml/backends*/libggml-rpc.so"))
    return {
        "GGML_BACKEND_PATH": peer.inside(library),
        "DROVER_RPC_LIBRARY": f"/{backend.relative_to(peer.root)}",
        "DROVER_RPC_ENDPOINT": f"127.0.0.1:{port}",
    }

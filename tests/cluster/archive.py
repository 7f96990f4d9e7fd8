"""Images written without an image tool: one layer, a configuration and a manifest, in Docker's archive format."""

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping
from pathlib import Path

MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def write(target: Path, name: str, layer: Path, config: Mapping[str, object]) -> None:
    """Write the image `name` to `target`: the layer, a tar file, and its configuration (Entrypoint, Env, User, …)."""
    with layer.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    image = {
        "architecture": MACHINES[platform.machine()],
        "os": "linux",
        "config": config,
        "history": [{"created_by": "drover's tests"}],
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{content}"]},
    }
    described = json.dumps(image).encode()
    image_file = f"{hashlib.sha256(described).hexdigest()}.json"
    manifest = json.dumps([{"Config": image_file, "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
    with tarfile.open(target, "w") as archive:
        for inside, body in ((image_file, described), ("manifest.json", manifest)):
            archive.addfile(_entry(inside, len(body)), io.BytesIO(body))
        with layer.open("rb") as file:
            archive.addfile(_entry("layer.tar", layer.stat().st_size), file)


def layer_of(target: Path, program: Path) -> None:
    """A layer that holds one program at its root."""
    with tarfile.open(target, "w") as archive:
        entry = _entry(program.name, program.stat().st_size)
        entry.mode = 0o755
        with program.open("rb") as file:
            archive.addfile(entry, file)


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o644
    return entry

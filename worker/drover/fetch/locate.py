"""A source -> the files to fetch for it: address, size and hash as far as the source tells. Nothing is downloaded."""

import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from drover.errors import ChecksumError, FetchError
from drover.fetch import web
from drover.sources import HubFile, OllamaModel, Source, VolumeFile, WebFile, file_name, shard_names

OLLAMA_REGISTRY = "https://registry.ollama.ai"
_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_MODEL_LAYER = "application/vnd.ollama.image.model"
_MOST_MANIFEST = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Remote:
    """One file to fetch: what it will be called here, and what is known of it; `token` is for its address only."""

    name: str
    url: str
    size: int | None = None
    sha256: str | None = None
    token: str | None = None


def locate(
    source: Source, token: str | None = None, registry: str = OLLAMA_REGISTRY, sha256: str | None = None
) -> list[Remote]:
    """The files of a model, in order; FetchError if the source does not have them.

    ChecksumError if it says itself that the first of them has another hash than `sha256`.
    """
    found = _files(source, token, registry)
    first = found[0]
    if sha256 is not None and first.sha256 not in (None, sha256):
        raise ChecksumError(f"{first.name} has the SHA-256 {first.sha256} at its source, and {sha256} was asked for")
    return found


def _files(source: Source, token: str | None, registry: str) -> list[Remote]:
    match source:
        case HubFile():
            return _hub(source, token)
        case OllamaModel():
            return [_ollama(source, token, registry.rstrip("/"))]
        case WebFile():
            return _web(source, token)
        case VolumeFile():
            raise FetchError(
                f"pvc://{source.claim}/{source.path} is on a volume already: there is nothing to fetch", "InvalidSource"
            )


def _hub(source: HubFile, token: str | None) -> list[Remote]:
    """All parts from the commit that the first one is of."""
    from huggingface_hub import get_token, hf_hub_url

    token = token or get_token()
    folder, slash, name = source.path.rpartition("/")
    revision, remotes = source.revision, []
    for part in shard_names(name):
        url = hf_hub_url(source.repo, f"{folder}{slash}{part}", revision=revision)
        headers = web.head(url, token)
        revision = headers.get("X-Repo-Commit") or revision
        size = headers.get("X-Linked-Size") or ""
        digest = (headers.get("X-Linked-Etag") or headers.get("ETag") or "").strip('"')
        remotes.append(
            Remote(
                name=file_name(HubFile(source.repo, part)),
                url=hf_hub_url(source.repo, f"{folder}{slash}{part}", revision=revision),
                size=int(size) if size.isdigit() else None,
                sha256=digest if _SHA256.fullmatch(digest) else None,
                token=token,
            )
        )
    return remotes


def _web(source: WebFile, token: str | None) -> list[Remote]:
    parts = urlsplit(source.url)
    folder, slash, name = parts.path.rpartition("/")
    urls = [urlunsplit(parts._replace(path=f"{folder}{slash}{part}")) for part in shard_names(name)]
    return [Remote(file_name(WebFile(url)), url, token=token) for url in urls]


def _ollama(source: OllamaModel, token: str | None, registry: str) -> Remote:
    """The one layer of an Ollama model that is its GGUF file."""
    base = f"{registry}/v2/{source.owner}/{source.name}"
    with web.get(f"{base}/manifests/{source.tag}", token=token, accept=_MANIFEST) as answer:
        raw = answer.read(_MOST_MANIFEST)
    layers = [layer for layer in _layers(raw, base) if layer.get("mediaType") == _MODEL_LAYER]
    if len(layers) != 1:
        raise FetchError(
            f"{base}:{source.tag} is no model in one GGUF file: it has {len(layers)} layers of type {_MODEL_LAYER}",
            "NotFound",
        )
    algorithm, _, digest = str(layers[0].get("digest")).partition(":")
    size = layers[0].get("size")
    if algorithm != "sha256" or not _SHA256.fullmatch(digest) or type(size) is not int:
        raise FetchError(f"{base}:{source.tag}: its manifest names its model oddly: {layers[0]}", "InvalidManifest")
    return Remote(file_name(source), f"{base}/blobs/sha256:{digest}", size, digest, token)


def _layers(raw: bytes, base: str) -> list[dict[str, Any]]:
    try:
        layers = json.loads(raw)["layers"]
    except (ValueError, KeyError, TypeError):
        layers = None
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise FetchError(f"{base}: what came is no manifest: {raw[:80]!r}", "InvalidManifest")
    return layers

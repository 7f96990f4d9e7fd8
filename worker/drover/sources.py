"""Where a model comes from: `model.source` of an InferenceCluster, `drover fetch SOURCE`. Pure: text in, parts out."""

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from drover.errors import FetchError

SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Name of one file of a split model."""
MOST_SHARDS = 1000

_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)/(?P<path>[^@?#]+\.gguf)(?:@(?P<revision>[^@?#\s]+))?", re.ASCII)
_OLLAMA = re.compile(r"(?:(?P<owner>[\w.-]+)/)?(?P<name>[\w.-]+)(?::(?P<tag>[\w.-]+))?", re.ASCII)
_VOLUME = re.compile(r"(?P<claim>[a-z0-9][a-z0-9.-]*)/(?P<path>[^?#]+)", re.ASCII)
_ODD = re.compile(r"[^\w.+=~-]+")


@dataclass(frozen=True, slots=True)
class HubFile:
    """`hf://org/repo/file.gguf[@revision]`."""

    repo: str
    path: str
    revision: str = "main"


@dataclass(frozen=True, slots=True)
class WebFile:
    """`https://…`, or `http://…` where nothing better is to be had."""

    url: str


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """`ollama://[owner/]name[:tag]`."""

    name: str
    tag: str = "latest"
    owner: str = "library"


@dataclass(frozen=True, slots=True)
class VolumeFile:
    """`pvc://claim/path.gguf`: there already, nothing to fetch."""

    claim: str
    path: str


Source = HubFile | WebFile | OllamaModel | VolumeFile


def parse(text: str) -> Source:
    """The parts of a source; FetchError says how to write it."""
    scheme, separator, rest = text.partition("://")
    reader = _READERS.get(scheme) if separator else None
    source = reader(text, rest) if reader else None
    if source is None:
        raise FetchError(
            f"{text!r} is no source of a model; write hf://org/repo/file.gguf[@revision], https://…/file.gguf, "
            "ollama://name[:tag] or pvc://claim/path.gguf",
            "InvalidSource",
        )
    return source


def file_name(source: Source) -> str:
    """What the model's file, or the first of its parts, is called once it is here."""
    match source:
        case HubFile(path=path) | VolumeFile(path=path):
            name = path.rpartition("/")[2]
        case WebFile(url=url):
            name = unquote(urlsplit(url).path).rpartition("/")[2]
        case OllamaModel(name=model, tag=tag, owner=owner):
            name = f"{'' if owner == 'library' else f'{owner}-'}{model}-{tag}"
    name = _ODD.sub("-", name).lstrip(".-") or "model"
    return name if name.endswith(".gguf") else f"{name}.gguf"


def shard_names(name: str) -> list[str]:
    """All the files of a split model by the name of one of them; a file that is whole stands for itself."""
    match = SHARD_NAME.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= MOST_SHARDS:
        raise FetchError(f"{name} cannot be one of {count} files", "InvalidSource")
    return [f"{match['stem']}-{number:05d}-of-{match['count']}.gguf" for number in range(1, count + 1)]


def _hub(_text: str, rest: str) -> Source | None:
    match = _HUB.fullmatch(rest)
    if match is None or ".." in match["path"].split("/"):
        return None
    return HubFile(match["repo"], match["path"], match["revision"] or "main")


def _web(text: str, _rest: str) -> Source | None:
    try:
        parts = urlsplit(text)
        whole = parts.hostname and parts.port != 0 and not re.search(r"\s", text)
    except ValueError:  # of a port that is no number, or of brackets
        return None
    return WebFile(text) if whole else None


def _ollama(_text: str, rest: str) -> Source | None:
    match = _OLLAMA.fullmatch(rest)
    return match and OllamaModel(match["name"], match["tag"] or "latest", match["owner"] or "library")


def _volume(_text: str, rest: str) -> Source | None:
    match = _VOLUME.fullmatch(rest)
    return match and VolumeFile(match["claim"], match["path"])


_READERS = {"hf": _hub, "https": _web, "http": _web, "ollama": _ollama, "pvc": _volume}

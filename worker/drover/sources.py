"""Where a model comes from: `model.source` of an InferenceCluster, `drover fetch SOURCE`. Pure: text in, parts out."""

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from drover.errors import FetchError

SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Name of one file of a split model."""
MOST_SHARDS = 1000

FORMS = {
    "hf": (
        re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)/(?P<path>[^@?#\s]+\.gguf)(@(?P<revision>[^@?#\s]+))?", re.ASCII),
        "hf://ORG/REPO/FILE.gguf[@REVISION]",
    ),
    "https": (re.compile(r"https://[^/\s]+/\S+"), "https://HOST/PATH"),
    "pvc": (
        re.compile(r"pvc://(?P<claim>[a-z0-9][-a-z0-9.]*)/(?P<path>([^/.\s?#][^/\s?#]*/)*[^/.\s?#][^/\s?#]*\.gguf)"),
        "pvc://CLAIM/PATH.gguf",
    ),
    "ollama": (
        re.compile(r"ollama://((?P<owner>[\w.-]+)/)?(?P<name>[\w.-]+)(:(?P<tag>[\w.-]+))?", re.ASCII),
        "ollama://[OWNER/]NAME[:TAG]",
    ),
}
"""Schemes of a model's source: what each looks like, for us and for people. The API server reads the patterns too."""
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
    scheme, separator, _ = text.partition("://")
    reader = _READERS.get(scheme) if separator else None
    source = reader(text) if reader else None
    if source is None:
        known = ", ".join(words for _, words in FORMS.values())
        raise FetchError(f"{text!r} is no source of a model; write {known}", "InvalidSource")
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


def _match(scheme: str, text: str) -> re.Match[str] | None:
    return FORMS[scheme][0].fullmatch(text)


def _hub(text: str) -> Source | None:
    match = _match("hf", text)
    if match is None or ".." in match["path"].split("/"):
        return None
    return HubFile(match["repo"], match["path"], match["revision"] or "main")


def _web(text: str) -> Source | None:
    try:
        parts = urlsplit(text)
        whole = parts.hostname and parts.port != 0 and not re.search(r"\s", text)
    except ValueError:  # of a port that is no number, or of brackets
        return None
    return WebFile(text) if whole else None


def _ollama(text: str) -> Source | None:
    match = _match("ollama", text)
    return match and OllamaModel(match["name"], match["tag"] or "latest", match["owner"] or "library")


def _volume(text: str) -> Source | None:
    match = _match("pvc", text)
    return match and VolumeFile(match["claim"], match["path"])


_READERS = {"hf": _hub, "https": _web, "http": _web, "ollama": _ollama, "pvc": _volume}

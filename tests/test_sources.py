"""Sources of models: how each is written, what its file is called, what is none."""

import pytest

from drover.errors import FetchError
from drover.sources import HubFile, OllamaModel, Source, VolumeFile, WebFile, file_name, parse, shard_names


@pytest.mark.parametrize(
    ("text", "source", "name"),
    [
        ("hf://org/repo/m.gguf", HubFile("org/repo", "m.gguf"), "m.gguf"),
        ("hf://org/re.po/a/b/m-Q4_K_M.gguf@v1.0", HubFile("org/re.po", "a/b/m-Q4_K_M.gguf", "v1.0"), "m-Q4_K_M.gguf"),
        ("hf://o/r/m.gguf@refs/pr/1", HubFile("o/r", "m.gguf", "refs/pr/1"), "m.gguf"),
        ("https://a.example/x/m.gguf?download=true", WebFile("https://a.example/x/m.gguf?download=true"), "m.gguf"),
        ("http://10.0.0.1:8080/m", WebFile("http://10.0.0.1:8080/m"), "m.gguf"),
        ("https://a.example/", WebFile("https://a.example/"), "model.gguf"),
        ("https://a.example/..%2F..%2Fm.gguf", WebFile("https://a.example/..%2F..%2Fm.gguf"), "m.gguf"),
        ("https://a.example/a%20b%5B*.gguf", WebFile("https://a.example/a%20b%5B*.gguf"), "a-b-.gguf"),
        ("ollama://llama3.2", OllamaModel("llama3.2"), "llama3.2-latest.gguf"),
        ("ollama://llama3.2:1b", OllamaModel("llama3.2", "1b"), "llama3.2-1b.gguf"),
        ("ollama://me/mine:x", OllamaModel("mine", "x", "me"), "me-mine-x.gguf"),
        ("pvc://models/a/m.gguf", VolumeFile("models", "a/m.gguf"), "m.gguf"),
    ],
)
def test_sources(text: str, source: Source, name: str) -> None:
    assert parse(text) == source
    assert file_name(source) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "m.gguf",
        "hf://org/repo",
        "hf://org/repo/m.safetensors",
        "hf://org/m.gguf",
        "hf://org/repo/../m.gguf",
        "https://",
        "https://host:port/m.gguf",
        "https://host/a b.gguf",
        "ollama://",
        "ollama://a/b/c",
        "ollama://a:b:c",
        "pvc://claim",
        "s3://bucket/m.gguf",
        "file:///etc/passwd",
    ],
)
def test_what_is_none_is_told_how_to_write_one(text: str) -> None:
    with pytest.raises(FetchError, match=r"is no source of a model; write hf://") as error:
        parse(text)
    assert (error.value.reason, error.value.transient) == ("InvalidSource", False)


def test_parts_of_a_split_model() -> None:
    assert shard_names("m.gguf") == ["m.gguf"]
    parts = ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"]
    assert shard_names("m-00002-of-00003.gguf") == parts
    for name in ("m-00004-of-00003.gguf", "m-00000-of-00003.gguf", "m-00001-of-99999.gguf"):
        with pytest.raises(FetchError):
            shard_names(name)

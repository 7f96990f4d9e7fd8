"""GGUF files good and bad: everything wrong is a ModelError that says what, and nothing else ever comes out."""

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from drover.coordinator.model_file import ModelFile, stamp_of
from drover.coordinator.model_header import read_header
from drover.errors import ModelChangedError, ModelError
from drover.ggml import types

ROWS = np.arange(8 * 256, dtype=np.float32).reshape(8, 256)


def write_model(path: Path, *, shard: tuple[int, int] | None = None, prefix: str = "") -> Path:
    """A small model written by the gguf package, the independent witness of the format."""
    writer = gguf.GGUFWriter(path, "llama")
    if shard is not None:
        writer.add_uint16("split.no", shard[0])
        writer.add_uint16("split.count", shard[1])
        writer.add_int32("split.tensors.count", 3 * shard[1])
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bool("test.flag", True)
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "▁é", ""])
    writer.add_array("tokenizer.ggml.scores", [0.0, -1.5, -2.5])
    writer.add_tensor(f"{prefix}a.weight", ROWS)
    writer.add_tensor(f"{prefix}b.weight", ROWS.astype(np.float16)[:3])
    quantized = gguf.quants.quantize(ROWS, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor(f"{prefix}c.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.gguf")


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(*, version: int = 3, tensors: int = 0, entries: int = 1, body: bytes = b"") -> bytes:
    architecture = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + architecture + body


def tensor(name: str, kind: int, offset: int = 0, extents: tuple[int, ...] = (32,)) -> bytes:
    return text(name) + struct.pack(f"<I{len(extents)}QIQ", len(extents), *extents, kind, offset)


def failure(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        ModelFile(path)
    return str(caught.value)


def test_reads_what_the_gguf_package_reads(model_path: Path) -> None:
    reader = gguf.GGUFReader(model_path)
    with ModelFile(model_path) as model:
        assert model.architecture == "llama"
        assert model.metadata == {
            name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")
        }
        assert list(model.tensors) == [entry.name for entry in reader.tensors]
        for entry in reader.tensors:
            info = model.tensors[entry.name]
            assert info.type.id == entry.tensor_type
            assert info.ne[: len(entry.shape)] == tuple(entry.shape)
            assert info.nbytes == entry.n_bytes == len(model.data(entry.name))
            assert model.data(entry.name) == entry.data.tobytes()


def test_data_is_mapped_and_read_only_and_outlives_the_file(model_path: Path) -> None:
    with ModelFile(model_path) as model:
        data = model.data("a.weight")
        assert data.readonly
    assert np.array_equal(np.frombuffer(data, np.float32).reshape(ROWS.shape), ROWS)


def renamed(path: Path) -> None:
    new = path.with_name("new.gguf")
    new.write_bytes(path.read_bytes())
    new.replace(path)


def written(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(path, ns=(0, 1))


@pytest.mark.parametrize("change", [renamed, written, Path.unlink, lambda path: path.write_bytes(b"GGUF")])
def test_a_file_that_changes_while_it_is_open_is_told(model_path: Path, change: Callable[[Path], object]) -> None:
    with ModelFile(model_path) as model:
        model.check_unchanged()
        change(model_path)
        with pytest.raises(ModelChangedError, match=r"model\.gguf: changed while it was being read; try again once"):
            model.check_unchanged()


def test_a_file_that_changed_before_it_was_opened_is_told(model_path: Path) -> None:
    with ModelFile(model_path) as model, model_path.open("rb") as before:
        known = {model_path: stamp_of(before.fileno())}
        model.check_unchanged(known)
    renamed(model_path)
    with ModelFile(model_path) as model:
        model.check_unchanged()
        with pytest.raises(ModelChangedError):
            model.check_unchanged(known)


def test_values_have_the_type_asked_for(model_path: Path) -> None:
    with ModelFile(model_path) as model:
        assert model.value("llama.block_count", int) == 2
        assert model.value("llama.block_count", float) == 2.0
        assert model.value("no.such.key", int, 7) == 7
        with pytest.raises(ModelError, match=r"no 'no\.such\.key'"):
            model.value("no.such.key", int)
        with pytest.raises(ModelError, match="is a bool, where a int is needed"):
            model.value("test.flag", int)
        with pytest.raises(ModelError, match="no tensor 'd'"):
            model.data("d")


def test_no_such_file_and_directory(tmp_path: Path) -> None:
    assert "no such file" in failure(tmp_path / "none.gguf")
    assert "a directory" in failure(tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "empty"),
        (b"GG", "not a GGUF file"),
        (b"\x00" * 100, "not a GGUF file"),
        (b"version https://git-lfs.example/spec/v1\n", "Git LFS pointer"),
        (b"PK\x03\x04" + bytes(100), "PyTorch"),
        (header(version=1), "GGUF version 1 is not supported"),
        (header(version=4), "GGUF version 4 is not supported"),
        (header(version=0x03000000), "big-endian"),
        (header(entries=2), "truncated in its header: at least 8 bytes are missing"),
        (header(entries=1 << 60), "metadata entries"),
        (header(tensors=1 << 40), "tensors"),
        (header(entries=2, body=text("general.architecture") + struct.pack("<IB", 0, 1)), "is there twice"),
        (header(entries=2, body=text("x") + struct.pack("<I8B", 13, *range(8))), "of type 13"),
        (header(entries=2, body=text("x") + struct.pack("<IIQ", 9, 9, 0)), "an array of arrays"),
        (header(entries=2, body=text("x") + struct.pack("<IIQ", 9, 0, 1 << 50)), "the most we read"),
        (header(entries=2, body=text("x") + struct.pack("<IIQQ", 9, 8, 1, 1 << 50)), "truncated in its header"),
        (header(entries=2, body=text("general.alignment") + struct.pack("<II", 4, 48)), "not a power of two"),
        (header(tensors=1, body=tensor("t", 4) + bytes(256)), "'t' has type Q4_2, which ggml has removed"),
        (header(tensors=1, body=tensor("t", 31) + bytes(256)), "Q4_0_4_4"),
        (header(tensors=1, body=tensor("t", 99) + bytes(256)), "'t' has type 99, which we do not know"),
        (header(tensors=1, body=tensor("t", 0, 8) + bytes(256)), "not a multiple of 32"),
        (header(tensors=1, body=tensor("t", 2, 0, (33,)) + bytes(256)), "block of 32"),
        (header(tensors=1, body=tensor("t", 0, 0, (1, 1, 1, 1, 1)) + bytes(256)), "5 dimensions"),
        (header(tensors=1, body=tensor("t", 0, 0, (1 << 40, 1 << 40)) + bytes(256)), "more than any file"),
        (header(tensors=2, body=tensor("t", 0) * 2 + bytes(512)), "'t' is there twice"),
    ],
)
def test_bad_files_say_what_is_wrong(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    message = failure(path)
    assert str(path) in message
    assert expected in message


def test_missing_architecture(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    assert "no 'general.architecture'" in failure(path)


def test_truncated_data_says_how_many_bytes_are_missing(model_path: Path) -> None:
    whole = model_path.read_bytes()
    end = max(record.offset + record.nbytes for record in read_header(memoryview(whole)).tensors)
    model_path.write_bytes(whole[: end - 100])
    assert f"truncated: 100 of {end} bytes are missing (tensor 'c.weight'" in failure(model_path)


def test_shards_are_opened_together_whichever_is_named(tmp_path: Path) -> None:
    paths = [write_model(tmp_path / f"m-{i + 1:05d}-of-00003.gguf", shard=(i, 3), prefix=f"blk.{i}.") for i in range(3)]
    for path in paths:
        with ModelFile(path) as model:
            assert len(model.tensors) == 9
            for i in range(3):
                assert model.data(f"blk.{i}.a.weight") == ROWS.tobytes()


def test_missing_shards_are_listed(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m-00002-of-00003.gguf", shard=(1, 3))
    message = failure(path)
    assert "2 of 3 files of the model are missing: m-00001-of-00003.gguf, m-00003-of-00003.gguf" in message


def test_misnamed_shards(tmp_path: Path) -> None:
    assert "rename it" in failure(write_model(tmp_path / "model.gguf", shard=(0, 2)))
    write_model(tmp_path / "m-00001-of-00002.gguf", shard=(0, 2), prefix="x.")
    path = write_model(tmp_path / "m-00002-of-00002.gguf", shard=(0, 2), prefix="y.")
    assert "by its contents file 1 of 2, by its name 2 of 2" in failure(path)


def test_shards_with_the_same_or_too_few_tensors(tmp_path: Path) -> None:
    write_model(tmp_path / "m-00001-of-00002.gguf", shard=(0, 2))
    path = write_model(tmp_path / "m-00002-of-00002.gguf", shard=(1, 2))
    assert "'a.weight' is also in m-00001-of-00002.gguf" in failure(path)
    short = header(
        entries=4,
        body=text("split.no") + struct.pack("<IH", 2, 1) + text("split.count") + struct.pack("<IH", 2, 2)
        + text("split.tensors.count") + struct.pack("<Ii", 5, 6),
    )  # fmt: skip
    path.write_bytes(short)
    assert "3 tensors in all files, where 6 should be" in failure(path)


def open_or_model_error(data: bytes) -> None:
    try:
        read_header(memoryview(data))
    except ModelError:
        return


def test_truncation_anywhere_is_a_model_error(model_path: Path) -> None:
    whole = model_path.read_bytes()
    records = read_header(memoryview(whole)).tensors
    head = min(record.offset for record in records)
    end = max(record.offset + record.nbytes for record in records)
    for size in [*range(head), *range(head, end, 97)]:
        with pytest.raises(ModelError):
            read_header(memoryview(whole[:size]))


def test_flipped_bytes_never_raise_anything_else(model_path: Path) -> None:
    whole = model_path.read_bytes()
    head = min(record.offset for record in read_header(memoryview(whole)).tensors)
    rng = random.Random(7)
    for _ in range(4000):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            damaged[rng.randrange(4, head)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        open_or_model_error(bytes(damaged))


def test_every_type_we_have_can_be_described(tmp_path: Path) -> None:
    for type_ in types.TYPES.values():
        path = tmp_path / "model.gguf"
        path.write_bytes(header(tensors=1, body=tensor("t", type_.id, 0, (512, 3))) + bytes(3 * 4096 + 64))
        with ModelFile(path) as model:
            assert model.tensors["t"].nbytes == type_.row_bytes(512) * 3

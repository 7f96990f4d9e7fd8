"""Fingerprint: the same bytes have the same, another model has another, and reading it costs little."""

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from drover.coordinator import fingerprint
from drover.coordinator.model_file import ModelFile
from drover.errors import ModelReplacedError
from support import tiny_model
from support.tiny_model import Tiny


def found(path: Path) -> str:
    with ModelFile(path) as file:
        return fingerprint.of(file)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_model.write(tmp_path / "m.gguf", Tiny(ff=512))
    return tmp_path / "m.gguf"


def test_the_same_bytes_elsewhere_have_the_same(model: Path, tmp_path: Path) -> None:
    shutil.copy(model, tmp_path / "other.gguf")
    assert found(tmp_path / "other.gguf") == found(model)
    assert len(found(model)) == fingerprint.LENGTH


def flip(path: Path, where: Callable[[ModelFile], int]) -> None:
    with ModelFile(path) as file:
        place = where(file)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("where", "seen"),
    [
        (lambda file: file.tensors["output.weight"].offset, True),
        (lambda file: file.tensors["blk.2.ffn_up.weight"].offset + fingerprint.SAMPLE - 1, True),
        (lambda file: file.tensors["output_norm.weight"].offset + file.tensors["output_norm.weight"].nbytes - 1, True),
        (lambda file: file.tensors["blk.2.ffn_up.weight"].offset + fingerprint.SAMPLE, False),
    ],
)
def test_the_first_bytes_of_every_tensor_count(model: Path, where: Callable[[ModelFile], int], seen: bool) -> None:
    before = found(model)
    flip(model, where)
    assert (found(model) != before) is seen


def test_a_value_of_the_header_counts_and_so_does_the_size(model: Path, tmp_path: Path) -> None:
    tiny_model.write(tmp_path / "eps.gguf", Tiny(ff=512, metadata={"attention.layer_norm_rms_epsilon": 1e-6}))
    assert found(tmp_path / "eps.gguf") != found(model)
    before = found(model)
    with model.open("ab") as file:
        file.write(bytes(32))
    assert found(model) != before


def test_every_file_of_a_split_model_counts(tmp_path: Path) -> None:
    rows = np.ones((4, 32), np.float32)
    for other in (1.0, 2.0):
        for number in range(2):
            writer = gguf.GGUFWriter(tmp_path / f"m-{number + 1:05d}-of-00002.gguf", "llama")
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", 2)
            writer.add_int32("split.tensors.count", 2)
            writer.add_tensor(f"{number}.weight", rows * other if number else rows)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
        name = tmp_path / "m-00002-of-00002.gguf"
        (tmp_path / f"{other}").write_text(found(name))
        assert found(name) == found(tmp_path / "m-00001-of-00002.gguf")
    assert (tmp_path / "1.0").read_text() != (tmp_path / "2.0").read_text()


def test_a_file_without_tensors_has_one(tmp_path: Path) -> None:
    assert found(tiny_model.write_stub(tmp_path / "stub.gguf"))


def test_another_model_than_the_one_that_was_proven(model: Path) -> None:
    with ModelFile(model) as file:
        fingerprint.check(file, fingerprint.of(file))
        with pytest.raises(
            ModelReplacedError, match=r"m\.gguf: another model than the one that was proven .*not 1234\)"
        ):
            fingerprint.check(file, "1234")

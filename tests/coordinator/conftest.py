"""Fixtures of the coordinator's tests: a small vocabulary, and real ones where they can be fetched."""

from pathlib import Path

import pytest

from drover.coordinator.model_file import ModelFile
from drover.coordinator.tokenizer import Tokenizer
from support.vocabularies import VocabulariesUnavailableError, real_vocabularies, write_byte_vocabulary


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level tokenizer whose first 256 ids are the bytes."""
    with ModelFile(write_byte_vocabulary(tmp_path_factory.mktemp("vocabulary") / "bytes.gguf")) as model:
        return Tokenizer.from_model(model)


@pytest.fixture(scope="session")
def vocabularies() -> Path:
    """The folder of real vocabularies and chat templates; without it the test is skipped with the reason."""
    try:
        return real_vocabularies()
    except VocabulariesUnavailableError as error:
        pytest.skip(str(error))

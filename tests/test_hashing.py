"""The tensor hash against its published values and a plain Python model."""

import subprocess
import sys

import numpy as np
import pytest

from drover.hashing import OFFSET_BASIS, fnv1a

PUBLISHED = [
    (b"", 0xCBF29CE484222325),
    (b"a", 0xAF63DC4C8601EC8C),
    (b"b", 0xAF63DF4C8601F1A5),
    (b"foobar", 0x85944171F73967E8),
]


@pytest.mark.parametrize(("data", "expected"), PUBLISHED)
def test_published_values(data: bytes, expected: int) -> None:
    assert fnv1a(data) == expected


def test_every_byte_value_and_kind_of_buffer() -> None:
    data = bytes(range(256)) * 5
    expected = OFFSET_BASIS
    for byte in data:
        expected = (expected ^ byte) * 0x100000001B3 % 2**64
    for kind in (data, bytearray(data), memoryview(data), np.frombuffer(data, np.float32)):
        assert fnv1a(kind) == expected


def test_continues_from_a_state() -> None:
    data = np.random.default_rng(1).bytes(1000)
    assert fnv1a(data[400:], fnv1a(data[:400])) == fnv1a(data)


def test_importing_does_not_import_numba() -> None:
    code = "import sys, drover.hashing; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

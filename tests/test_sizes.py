import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover.errors import DroverError
from drover.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1073741824", 1 << 30),
        ("4GiB", 4 << 30),
        ("4Gi", 4 << 30),
        ("4G", 4 << 30),
        ("4gb", 4 << 30),
        ("512 MiB", 512 << 20),
        (" 1.5 GiB ", 3 << 29),
        ("3k", 3072),
        ("2TiB", 2 << 40),
        ("9007199254740993", (1 << 53) + 1),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "4 gigs", "GiB", "-1GiB", "4GiB4", "1e9", "4PiB", "nan", "٤GiB", "9" * 400])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(DroverError, match=r"is not a size; write e\.g\. 4GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (4 << 30, "4.0 GiB"),
        (3 << 50, "3072.0 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_format(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(0, 1 << 50))
def test_what_we_print_can_be_read_again(size: int) -> None:
    assert abs(parse_size(format_size(size)) - size) <= max(size * 0.05, 1)

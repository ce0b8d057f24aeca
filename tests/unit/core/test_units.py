import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.core.errors import InvalidSize
from memfit.core.units import GIB, KIB, MIB, format_size, looks_like_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("24GiB", 24 * GIB),
        ("24 gib", 24 * GIB),
        (" 1.5 GiB ", 3 * GIB // 2),
        ("24GB", 24 * 10**9),
        ("800MB", 800 * 10**6),
        ("1TiB", 1024 * GIB),
        ("512", 512),
        ("7b", 7),
        (4096, 4096),
    ],
)
def test_sizes_are_parsed(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "24 bananas", "1e9", "-5GiB", "1.GiB", "24GiB 2", "nan", "inf"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InvalidSize, match=r"is not a size\. Write a number and a unit, such as 24GiB"):
        parse_size(text)
    assert not looks_like_size(text)


@pytest.mark.parametrize("text", ["0GiB", "0.0001B", 0, -1])
def test_a_size_is_positive(text):
    with pytest.raises(InvalidSize, match="a size must be positive, but"):
        parse_size(text)


@pytest.mark.parametrize("text", ["9" * 400 + "GiB", "9" * 30 + "TiB"])
def test_a_size_beyond_any_memory_is_refused_briefly(text):
    with pytest.raises(InvalidSize, match="more than any memory has") as refused:
        parse_size(text)
    assert len(str(refused.value)) < 120


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (None, "unknown"),
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.00 KiB"),
        (10 * MIB, "10.0 MiB"),
        (-3 * GIB, "-3.00 GiB"),
        (2048 * GIB, "2.00 TiB"),
    ],
)
def test_sizes_are_printed(size_bytes, text):
    assert format_size(size_bytes) == text


@given(st.integers(min_value=1, max_value=2**62))
def test_what_is_printed_can_be_parsed(size_bytes):
    # GIVEN any size, WHEN it is printed and read again, THEN it is off by no more than what was rounded away
    assert parse_size(format_size(size_bytes)) == pytest.approx(size_bytes, rel=0.01)

import pytest

from memfit.allocator.rounding import round_size, segment_size
from memfit.core.units import KIB, MIB


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (1, 512),
        (511, 512),
        (512, 512),
        (513, 1024),
        (MIB - 1, MIB),
        (MIB + 1, MIB + 512),
        (10 * MIB + 1, 10 * MIB + 512),
    ],
)
def test_requests_are_rounded_to_512_bytes(request_bytes: int, expected: int) -> None:
    assert round_size(request_bytes) == expected


@pytest.mark.parametrize(
    ("request_bytes", "divisions", "expected"),
    [
        # 1200 KiB lies between 1024 and 2048 KiB; a quarter of 1024 is 256; 1200 / 256 = 4.7, so 5 * 256 = 1280.
        (1200 * KIB, 4, 1280 * KIB),
        # A multiple of the step stays: 1280 = 5 * 256.
        (1280 * KIB, 4, 1280 * KIB),
        # One byte more takes the next step: 6 * 256 = 1536.
        (1280 * KIB + 1, 4, 1536 * KIB),
        # The last step of the interval is the next power of two.
        (2000 * KIB, 4, 2048 * KIB),
        # A power of two stays.
        (2048 * KIB, 4, 2048 * KIB),
        # Half steps: 1024, 1536, 2048.
        (1200 * KIB, 2, 1536 * KIB),
        # At most 512 * divisions = 2048: the plain rounding to 512 applies.
        (2048, 4, 2048),
        (1600, 4, 2048),
        # Just above it: between 2048 and 4096 a quarter is 512.
        (2049, 4, 2560),
        # 1 is as good as off: the power-of-two rule needs more than one division.
        (1200 * KIB + 1, 1, 1200 * KIB + 512),
        (1200 * KIB + 1, 0, 1200 * KIB + 512),
    ],
)
def test_power_of_two_divisions(request_bytes: int, divisions: int, expected: int) -> None:
    assert round_size(request_bytes, divisions) == expected


@pytest.mark.parametrize("divisions", [2, 4, 8, 16, 64])
def test_power_of_two_divisions_keep_multiples_of_512(divisions: int) -> None:
    for request_bytes in range(1, 400_000, 997):
        rounded = round_size(request_bytes, divisions)
        assert rounded % 512 == 0
        assert request_bytes <= rounded


@pytest.mark.parametrize(
    ("block_bytes", "expected"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (100 * MIB, 100 * MIB),
    ],
)
def test_segments_have_three_sizes(block_bytes: int, expected: int) -> None:
    assert segment_size(block_bytes) == expected

import pytest

from memfit.allocator import parse_options
from memfit.core.errors import BadInput
from memfit.core.replay import AllocatorOptions
from memfit.core.units import MIB


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", AllocatorOptions()),
        ("expandable_segments:True", AllocatorOptions(expandable_segments=True)),
        ("expandable_segments:False", AllocatorOptions()),
        ("max_split_size_mb:128", AllocatorOptions(max_split_size_bytes=128 * MIB)),
        ("garbage_collection_threshold:0.8", AllocatorOptions(garbage_collection_threshold=0.8)),
        ("roundup_power2_divisions:4", AllocatorOptions(roundup_power2_divisions=4)),
        ("backend:native", AllocatorOptions()),
        (
            " expandable_segments:True, max_split_size_mb:64,roundup_power2_divisions:[256:2,>:2],"
            "garbage_collection_threshold:0.6,",
            AllocatorOptions(True, 64 * MIB, 0.6, 2),
        ),
    ],
)
def test_what_pytorch_reads_is_read(text, options):
    reported = []

    assert parse_options(text, reported.append) == options
    assert reported == []


def test_a_list_by_size_becomes_what_rounds_most():
    # GIVEN no rounding up to 256 MiB, halves up to 512, eighths above
    reported = []

    options = parse_options("roundup_power2_divisions:[256:0,512:2,>:8]", reported.append)

    # THEN halves everywhere, and it is said
    assert options.roundup_power2_divisions == 2
    assert reported == [
        "roundup_power2_divisions:[256:0,512:2,>:8] of PYTORCH_ALLOC_CONF was taken as roundup_power2_divisions:2 "
        "for all sizes, which rounds most"
    ]


def test_a_list_that_turns_rounding_off_everywhere():
    assert parse_options("roundup_power2_divisions:[256:0,>:1]").roundup_power2_divisions == 0


def test_settings_that_are_not_simulated_are_reported():
    reported = []

    parse_options("pinned_num_register_threads:8,backend:cudaMallocAsync,max_split_size_mb:32", reported.append)

    assert reported == [
        "pinned_num_register_threads:8 of PYTORCH_ALLOC_CONF isn't simulated; the default was assumed",
        "backend:cudaMallocAsync of PYTORCH_ALLOC_CONF isn't simulated; the default was assumed",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expandable_segments", "can't be read from 'expandable_segments' on"),
        ("expandable_segments=True", "can't be read from 'expandable_segments=True' on"),
        ("max_split_size_mb:64;expandable_segments:True", "can't be read from 'max_split_size_mb:64;"),
        ("max_split_size_mb:64,,", "can't be read from ',' on"),
        ("roundup_power2_divisions:[256:1", "can't be read from 'roundup_power2_divisions:"),
        ("expandable_segments:true", "expandable_segments in PYTORCH_ALLOC_CONF must be True or False, but 'true'"),
        ("max_split_size_mb:19", "max_split_size_bytes must be at least 20 MiB"),
        ("max_split_size_mb:1.5", "max_split_size_mb in PYTORCH_ALLOC_CONF must be a whole number, but '1.5'"),
        ("garbage_collection_threshold:0", "must be a number between 0 and 1, but '0' was given"),
        ("garbage_collection_threshold:1", "must be a number between 0 and 1, but '1' was given"),
        ("garbage_collection_threshold:high", "must be a number between 0 and 1, but 'high' was given"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions must be a power of two"),
        ("roundup_power2_divisions:[256:3,>:4]", "roundup_power2_divisions must be a power of two"),
        ("roundup_power2_divisions:[large:4]", r"must be a number or a list such as \[256:1,512:2,>:8\]"),
        ("roundup_power2_divisions:[256]", "must be a whole number, but '' was given"),
    ],
)
def test_what_pytorch_refuses_is_refused(text, message):
    with pytest.raises(BadInput, match=message):
        parse_options(text)

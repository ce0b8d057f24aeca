import pytest

from memfit.core import env

OLD, NEW = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ""),
        ({OLD: "max_split_size_mb:20"}, "max_split_size_mb:20"),
        ({NEW: "expandable_segments:True"}, "expandable_segments:True"),
        ({OLD: "max_split_size_mb:20", NEW: "expandable_segments:True"}, "expandable_segments:True"),
        ({OLD: "max_split_size_mb:20", NEW: ""}, "max_split_size_mb:20"),
    ],
    ids=str,
)
def test_the_allocators_settings_by_either_name(monkeypatch, given, expected):
    for name in (OLD, NEW):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    assert env.allocator_settings() == expected

import os

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


@pytest.mark.parametrize(("given", "name"), [({}, OLD), ({OLD: "a:1"}, OLD), ({NEW: "a:1"}, NEW)], ids=str)
def test_the_allocators_settings_can_be_given_and_taken_back(monkeypatch, given, name):
    for known in (OLD, NEW):
        monkeypatch.delenv(known, raising=False)
    for known, value in given.items():
        monkeypatch.setenv(known, value)

    env.set_allocator_settings("expandable_segments:True")
    assert os.environ[name] == env.allocator_settings() == "expandable_segments:True"
    env.set_allocator_settings("")
    assert env.allocator_settings() == ""

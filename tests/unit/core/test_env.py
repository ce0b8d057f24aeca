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


def test_the_request_of_a_supervised_run(monkeypatch):
    monkeypatch.delenv(env.RUN_REQUEST, raising=False)
    assert env.run_request() == ""

    environment = env.with_run_request("/somewhere/request.json")

    assert environment == {**os.environ, "MEMFIT_RUN": "/somewhere/request.json"}
    monkeypatch.setenv(env.RUN_REQUEST, "other.json")
    assert env.run_request() == "other.json"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "3"}, (1, 3)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "0"}, None),
        ({"RANK": "3", "WORLD_SIZE": "3"}, None),
        ({"RANK": "first", "WORLD_SIZE": "3"}, None),
    ],
    ids=str,
)
def test_the_rank_that_a_launcher_gave(monkeypatch, given, expected):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    assert env.launched_rank() == expected


def test_visible_devices(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert env.visible_cuda_devices() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert env.visible_cuda_devices() == ""


def test_the_spool_folder_is_part_of_the_cache_unless_given(monkeypatch):
    monkeypatch.delenv("MEMFIT_SPOOL", raising=False)
    monkeypatch.setenv("MEMFIT_CACHE", "cache")
    assert env.spool_folder() == os.path.join("cache", "spool")
    monkeypatch.setenv("MEMFIT_SPOOL", "large-disk")
    assert env.spool_folder() == "large-disk"


@pytest.mark.parametrize(("given", "expected"), [(None, 1), ("4", 4), ("0", 1), ("many", 1)])
def test_the_number_of_ranks_on_this_machine(monkeypatch, given, expected):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if given is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", given)

    assert env.num_local_ranks() == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [(":4096:2:16:8", 8320 * 1024), (":16:8", 16 * 8 * 1024), (":0:0", 0), ("", None), ("nonsense", None)],
)
def test_the_workspace_of_cublas(monkeypatch, given, expected):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)

    assert env.cublas_workspace_bytes() == expected

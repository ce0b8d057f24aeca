import subprocess
import sys

import numpy as np
import pytest

import memfit
from memfit.api import stream as _stream
from memfit.core.errors import BadInput
from memfit.core.units import GIB, MIB


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.arange(400.0).reshape(100, 4))
    return path


def test_a_path_becomes_batches(path):
    stream = memfit.stream(path, batch_size=32)
    batches = list(stream)

    assert isinstance(stream, memfit.Stream)
    assert [len(batch) for batch in batches] == [32, 32, 32, 4]
    assert batches[0].dtype == np.float32
    assert sorted(np.concatenate(batches)[:, 0]) == list(range(0, 400, 4))


def test_files_that_cant_be_read_in_blocks_are_unpacked_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    np.savez_compressed(tmp_path / "data.npz", x=np.arange(300.0).reshape(100, 3), y=np.arange(100))

    stream = memfit.stream(tmp_path / "data.npz", batch_size=10)
    features, labels = next(iter(stream))

    assert (features[:, 0] / 3).tolist() == labels.tolist()
    assert not stream.source.layout.is_sequential


def test_a_budget_that_is_too_small_is_refused_before_anything_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    np.savez_compressed(tmp_path / "data.npz", x=np.zeros((100, 300)))
    np.save(tmp_path / "data.npy", np.zeros((100, 300)))

    for name in ("data.npz", "data.npy"):
        with pytest.raises(BadInput, match="too little"):
            memfit.stream(tmp_path / name, batch_size=10, memory="1KiB")

    assert not (tmp_path / "cache").exists()


def test_the_same_batches_for_every_framework(path):
    options = memfit.StreamOptions(seed=4)
    plain = np.concatenate(list(memfit.stream(path, batch_size=8, options=options)))

    loaded = [batch.numpy() for batch in memfit.stream(path, batch_size=8, options=options).loader()]
    made = list(memfit.stream(path, batch_size=8, options=options).parallel(2))

    assert np.array_equal(np.concatenate(loaded), plain)
    assert np.array_equal(np.concatenate(made), plain)
    assert len(memfit.stream(path, batch_size=8).torch()) == 13


def test_transforms_may_draw_from_torch(path):
    import torch

    def noisy(row):
        return row + torch.rand(()).item()

    state = torch.get_rng_state()
    first = np.concatenate(list(memfit.stream(path, batch_size=8, transform=noisy)))
    second = np.concatenate(list(memfit.stream(path, batch_size=8, transform=noisy)))

    assert np.array_equal(first, second)
    assert not np.array_equal(first, np.round(first))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_budget_by_itself_is_a_share_of_what_the_container_may_have(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for limit, expected in ((9 * GIB, 2 * GIB), (100 * MIB, 64 * MIB), (999 * GIB, 4 * GIB), (None, 512 * MIB)):
        monkeypatch.setattr(_stream, "host_memory_bytes", lambda limit=limit: limit)
        assert _stream._budget("auto") == expected
    monkeypatch.setattr(_stream, "host_memory_bytes", lambda: 8 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert _stream._budget("auto") == 512 * MIB
    assert _stream._budget("1GiB") == GIB


def test_ranks_with_a_budget_by_itself_have_the_same_order(tmp_path):
    # GIVEN two processes, one of which takes 300 MiB more than the other
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((1000, 4), np.float32))
    script = (
        "import sys, memfit\n"
        "kept = bytearray(b'1') * int(sys.argv[2])\n"
        "print(memfit.stream(sys.argv[1], batch_size=8, memory='auto').memory_bytes)"
    )

    def budget(size):
        command = [sys.executable, "-c", script, str(path), str(size)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout

    assert budget(0) == budget(300 * MIB)


def test_a_loader_over_the_stream_itself_is_told_what_to_take(path):
    from torch.utils.data import DataLoader

    for options in ({}, {"batch_size": None}):
        with pytest.raises(BadInput, match=r"can't be indexed.*stream\.loader\(\)"):
            next(iter(DataLoader(memfit.stream(path, batch_size=8), **options)))


def test_bad_input_is_refused_before_anything_is_read(path, tmp_path):
    with pytest.raises(BadInput, match="'lots' is not a size"):
        memfit.stream(path, batch_size=8, memory="lots")
    with pytest.raises(BadInput, match=r"missing\.npy"):
        memfit.stream(tmp_path / "missing.npy", batch_size=8)
    with pytest.raises(BadInput, match="on_error"):
        memfit.stream(path, batch_size=8, options=memfit.StreamOptions(on_error="ignore"))


def test_a_stream_says_what_it_is(path):
    stream = memfit.stream(path, batch_size=8)

    assert "x.npy', 100 samples in batches of 8, memory 512.0 MiB, epoch 0)" in repr(stream)
    assert "rank 1 of 2" in repr(stream.split(1, 2))


def test_a_stream_that_isnt_split_says_so_to_one_process_of_several(path, monkeypatch, caplog):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    stream = memfit.stream(path, batch_size=8)

    next(iter(stream.split(0, 2)))
    assert not caplog.text
    next(iter(stream))

    assert "gives all batches to each of them" in caplog.text

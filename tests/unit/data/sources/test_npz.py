import os
import pickle
import threading
import zipfile
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memfit.core.errors import BadFile, BadInput
from memfit.data.files import LocalFile
from memfit.data.sources.npz import NpzSource, obvious_pair
from tests.sources import names, read

X = np.random.default_rng(0).normal(size=(60, 3, 4)).astype("f4")
Y = np.arange(60) % 7
SAVERS = pytest.mark.parametrize("save", [np.savez, np.savez_compressed])


@SAVERS
def test_samples_are_those_of_the_arrays_in_any_order(tmp_path, save):
    save(tmp_path / "d.npz", x=X, y=Y)
    source = NpzSource(tmp_path / "d.npz")

    assert source.num_samples == 60
    assert source.classes == ()
    assert names(source) == [("x", False), ("y", True)]
    for start, stop in [(0, 60), (50, 60), (3, 4), (0, 7), (7, 20), (30, 40), (5, 5)]:
        x, y = read(source, start, stop)
        np.testing.assert_array_equal(x, X[start:stop])
        np.testing.assert_array_equal(y, Y[start:stop])
    np.testing.assert_array_equal(read(source, 2, 9, "f8")[0], X[2:9].astype("f8"))


@SAVERS
def test_fortran_order_is_read_too(tmp_path, save):
    save(tmp_path / "d.npz", a=np.asfortranarray(X))
    source = NpzSource(tmp_path / "d.npz")

    assert source.layout.is_sequential
    for start, stop in [(0, 60), (10, 20)]:
        np.testing.assert_array_equal(read(source, start, stop)[0], X[start:stop])


def test_stored_members_are_read_in_place(tmp_path):
    np.savez(tmp_path / "d.npz", x=X, y=Y)
    source = NpzSource(tmp_path / "d.npz")

    layout = source.layout
    assert (layout.edges, layout.is_sequential, layout.reason) == (None, False, "")
    assert all(isinstance(array.file, LocalFile) for array in source._arrays)


def test_compressed_members_are_sequential_and_say_why(tmp_path):
    np.savez_compressed(tmp_path / "d.npz", x=X, y=Y)

    layout = NpzSource(tmp_path / "d.npz").layout

    assert layout.is_sequential
    assert "a compressed .npz can't be mapped, nor read from its middle" in layout.reason
    assert "np.savez writes it uncompressed" in layout.reason


def test_going_forwards_unpacks_once_and_going_back_begins_again(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "d.npz", x=X)
    source = NpzSource(tmp_path / "d.npz")
    begun = []
    original = zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", lambda *settings: (begun.append(1), original(*settings))[1])

    read(source, 0, 10)
    del begun[:]
    for start in range(10, 60, 5):
        read(source, start, start + 5)
    assert len(begun) == 0
    read(source, 0, 5)

    assert len(begun) == 1


def test_hints_and_close_reach_the_file(tmp_path, monkeypatch):
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "d.npz", x=X, y=Y)
        source = NpzSource(tmp_path / "d.npz")
        before = read(source, 0, 10)
        source.drop(0, 10)
        source.close()
        np.testing.assert_array_equal(read(source, 0, 10)[0], before[0])


@SAVERS
def test_keys_are_chosen(tmp_path, save):
    path = tmp_path / "d.npz"
    save(path, a=X, b=X[:, 0], c=Y)

    assert names(NpzSource(path)) == [("a", False), ("b", False), ("c", False)]
    assert names(NpzSource(path, labels="c")) == [("a", False), ("b", False), ("c", True)]
    assert names(NpzSource(path, columns=["b"], labels="c")) == [("b", False), ("c", True)]
    assert names(NpzSource(path, columns=["c", "a"])) == [("c", False), ("a", False)]
    with pytest.raises(BadInput, match=r"d\.npz' has no array 'z'. It has: 'a', 'b', 'c'"):
        NpzSource(path, columns=["z"])
    with pytest.raises(BadInput, match=r"columns names 'a' more than once\. Name each array once"):
        NpzSource(path, columns=["a", "a"])
    with pytest.raises(BadInput, match="is left for features, which are needed too: 'c' is the label"):
        NpzSource(path, columns=["c"], labels="c")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["x", "y"], ("x", "y")),
        (["Y", "X"], ("X", "Y")),
        (["y_train", "x_train"], ("x_train", "y_train")),
        (["images", "labels"], ("images", "labels")),
        (["test_labels", "test_images"], ("test_images", "test_labels")),
        (["data", "target"], ("data", "target")),
        (["data_y", "data_x"], ("data_x", "data_y")),
        (["features", "targets"], ("features", "targets")),
        (["x_train", "y_test"], None),
        (["x", "z"], None),
        (["index", "any"], None),
        (["x"], None),
        (["x", "y", "z"], None),
        (["x", "x"], None),
    ],
)
def test_obvious_pairs(given, expected):
    assert obvious_pair(given) == expected


def test_arrays_of_different_length_are_named(tmp_path):
    np.savez(tmp_path / "d.npz", x_train=X, y_train=Y[:50])

    with pytest.raises(BadFile, match=r"'x_train' has 60, 'y_train' has 50\. Choose those that belong together"):
        NpzSource(tmp_path / "d.npz")
    assert names(NpzSource(tmp_path / "d.npz", columns=["y_train"])) == [("y_train", False)]


def test_what_cannot_be_read_is_refused(tmp_path):
    path = tmp_path / "d.npz"
    np.savez(path, x=np.array([None, {}], object), allow_pickle=True)
    with pytest.raises(BadFile, match=r"'x\.npy' in .*d\.npz' holds Python objects"):
        NpzSource(path, columns=["x"])
    np.savez(path, x=np.zeros(3, [("a", "f4")]))
    with pytest.raises(BadFile, match="is a structured array; save its columns"):
        NpzSource(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    with pytest.raises(BadFile, match=r"without arrays in it \(it holds archive/data\.pkl\)"):
        NpzSource(path)
    path.write_bytes(b"this is not an archive at all")
    with pytest.raises(BadFile, match=r"d\.npz' \(29 bytes\) can't be read as an \.npz file: File is not a zip file"):
        NpzSource(path)


def test_encrypted_members_are_refused(tmp_path):
    path = tmp_path / "d.npz"
    np.savez(path, x=X)
    contents = bytearray(path.read_bytes())
    contents[contents.rindex(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(contents)

    with pytest.raises(BadFile, match="is encrypted"):
        NpzSource(path)


def test_a_stored_member_without_its_header_is_named_with_the_offset(tmp_path):
    path = tmp_path / "d.npz"
    np.savez(path, x=X)
    contents = bytearray(path.read_bytes())
    contents[:4] = b"ABCD"
    path.write_bytes(contents)

    with pytest.raises(BadFile, match=r"'x\.npy' in .* is damaged: at offset 0 b'ABCD' was found"):
        NpzSource(path)


def test_a_member_that_should_be_longer_than_the_file_is_cut_short(tmp_path):
    path = tmp_path / "d.npz"
    np.savez(path, x=X)
    contents = bytearray(path.read_bytes())
    directory = contents.rindex(b"PK\x01\x02")
    contents[directory + 24 : directory + 28] = (10**6).to_bytes(4, "little")
    path.write_bytes(contents)

    with pytest.raises(BadFile, match=r"is cut short: it should end at offset \d+, and the file has"):
        NpzSource(path)


@SAVERS
def test_a_cut_archive_is_a_bad_file(tmp_path, save):
    path = tmp_path / "d.npz"
    save(path, x=X, y=Y)
    whole = path.read_bytes()

    for length in range(0, len(whole), len(whole) // 13):
        path.write_bytes(whole[:length])
        with pytest.raises(BadFile, match=r"d\.npz"):
            NpzSource(path)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**9), st.integers(1, 255))
def test_damage_in_compressed_data_is_found_by_its_end(tmp_path, place, change):
    path = tmp_path / "d.npz"
    np.savez_compressed(path, x=X)
    contents = bytearray(path.read_bytes())
    first, last = contents.index(b"x.npy") + 25, contents.rindex(b"PK\x01\x02")
    contents[first + place % (last - first)] ^= change
    path.write_bytes(contents)

    try:
        found = read(NpzSource(path), 0, 60)[0]
    except BadFile as error:
        assert "d.npz" in str(error)
    else:
        # Bits behind the last code of the stream mean nothing.
        np.testing.assert_array_equal(found, X)


def test_a_checksum_that_is_wrong_is_told(tmp_path):
    path = tmp_path / "d.npz"
    np.savez_compressed(path, x=X)
    contents = bytearray(path.read_bytes())
    contents[contents.rindex(b"PK\x01\x02") + 16] ^= 1
    path.write_bytes(contents)

    with pytest.raises(BadFile, match=r"'x\.npy' in .* is damaged: unpacking .* Bad CRC-32"):
        read(NpzSource(path), 0, 60)


def test_an_archive_cut_after_it_was_opened_is_named(tmp_path):
    path = tmp_path / "d.npz"
    np.savez_compressed(path, x=X)
    source = NpzSource(path)
    source.close()
    os.truncate(path, 500)

    with pytest.raises(BadFile, match=r"d\.npz"):
        read(source, 0, 60)


@SAVERS
def test_it_is_read_by_threads_after_a_fork_and_from_a_pickle(tmp_path, save):
    save(tmp_path / "d.npz", x=X, y=Y)
    source = NpzSource(tmp_path / "d.npz")
    failures = []

    def check(copy):
        for start in [*range(0, 50, 7), 5]:
            x, y = read(copy, start, start + 9)
            if not (np.array_equal(x, X[start : start + 9]) and np.array_equal(y, Y[start : start + 9])):
                failures.append(start)

    copies = (source, source, pickle.loads(pickle.dumps(source)))
    threads = [threading.Thread(target=check, args=(copy,)) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read(source, 0, 20)
    child = os.fork() if hasattr(os, "fork") else None
    if child == 0:
        check(source)
        os._exit(len(failures) > 0)

    assert failures == []
    assert child is None or os.waitpid(child, 0)[1] == 0
    check(source)
    assert failures == []


def test_its_fingerprint_changes_with_the_file_and_the_choice(tmp_path):
    path = tmp_path / "d.npz"
    np.savez(path, x=X, y=Y)
    before = NpzSource(path).fingerprint()

    assert NpzSource(path).fingerprint() == before
    assert NpzSource(path, columns=["x"]).fingerprint() != before
    np.savez(path, x=X, y=Y, z=Y)
    assert NpzSource(path, columns=["x"], labels="y").fingerprint() != before

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from memfit.core.errors import BadFile, BadInput
from memfit.data import array as array_module
from memfit.data.array import open_array

SHAPE = (11, 3, 4)
WHOLE = np.arange(np.prod(SHAPE), dtype="f4").reshape(SHAPE)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("array") / "x.npy"
    np.save(path, WHOLE)
    return path


def same(found, expected):
    np.testing.assert_array_equal(found, expected)
    assert np.shape(found) == np.shape(expected)
    assert getattr(found, "dtype", None) == getattr(expected, "dtype", None)


def test_it_looks_like_an_array(path):
    array = open_array(path)

    assert (array.shape, array.dtype, array.ndim) == (SHAPE, np.float32, 3)
    assert (len(array), array.size, array.nbytes) == (11, WHOLE.size, WHOLE.nbytes)
    assert array.name == str(path)
    assert repr(array) == f"ArrayFile({str(path)!r}, shape=(11, 3, 4), dtype=float32)"


@pytest.mark.parametrize(
    "index",
    [
        3,
        -1,
        np.int8(2),
        np.array(4),
        slice(2, 5),
        slice(None),
        slice(-3, None),
        slice(1, 10, 3),
        slice(None, None, -1),
        slice(9, 2, -2),
        slice(5, 2),
        [3, 1, 2],
        [3, 3, -1],
        [],
        np.array([[0, 10], [5, 5]]),
        range(2, 4),
        np.arange(11) % 3 == 0,
        [True, False] * 5 + [True],
        WHOLE[:, :, 0] > 20,
        WHOLE > 50,
        np.zeros(11, bool),
        (slice(2, 9), 1),
        (slice(2, 9), ..., 0),
        (..., 0),
        (..., slice(1, 3)),
        (2, 1, 3),
        (2, ..., 3),
        (slice(None, None, 2), slice(None), [0, 2]),
        ([3, 1], [0, 2]),
        ([3, 1], slice(None), [0, 2]),
        ([[3], [1]], [0, 2]),
        (slice(None), None, 1),
        (3, None),
        (),
        ...,
        (np.arange(11) > 8, 1),
    ],
)
def test_indices_give_what_numpy_gives(path, index):
    same(open_array(path)[index], WHOLE[index])


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hnp.basic_indices(SHAPE, allow_newaxis=False))
def test_any_basic_index_gives_what_numpy_gives(path, index):
    same(open_array(path)[index], WHOLE[index])


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hnp.integer_array_indices(SHAPE, result_shape=hnp.array_shapes(max_dims=2, max_side=4)))
def test_any_index_of_numbers_gives_what_numpy_gives(path, index):
    same(open_array(path)[index], WHOLE[index])


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(-200, 199), max_size=30), st.sampled_from([1, 40, 10_000]), st.sampled_from([0, 50, 10**6]))
def test_rows_near_and_far_are_put_together(tmp_path_factory, rows, block_bytes, gap_bytes):
    whole = np.arange(600, dtype="i2").reshape(200, 3)
    path = tmp_path_factory.getbasetemp() / "rows.npy"
    np.save(path, whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array_module, "_BLOCK_BYTES", block_bytes)
        patch.setattr(array_module, "_GAP_BYTES", gap_bytes)

        same(open_array(path)[rows], whole[np.array(rows, int)])
        same(open_array(path)[5:150:7, 1], whole[5:150:7, 1])
        same(open_array(path)[:, ::2], whole[:, ::2])


@pytest.mark.parametrize(
    "index", [11, -12, [0, 11], [-12], (11, 0), (0, 0, 0, 0), (0, 5), (..., ...), 1.5, "a", [0.5], None]
)
def test_bad_indices_are_refused(path, index):
    with pytest.raises(IndexError):
        open_array(path)[index]


def test_bad_indices_are_named(path):
    array = open_array(path)

    with pytest.raises(IndexError, match=r"index 11 is out of bounds: .*x\.npy has 11 rows"):
        array[11]
    with pytest.raises(IndexError, match="index -99 is out of bounds"):
        array[[1, -99]]
    with pytest.raises(IndexError, match="4 axes are indexed, and there are 3"):
        array[0, 0, 0, 0]
    with pytest.raises(IndexError, match=r"an index is a number, a slice, .*; 'a' is none"):
        array["a"]
    with pytest.raises(IndexError, match="a new axis can't come before the rows"):
        array[None]
    with pytest.raises(IndexError, match="True is none"):
        array[True]
    with pytest.raises(IndexError, match=r"a mask of the shape \(5,\) was given"):
        array[np.ones(5, bool)]


def test_only_the_rows_asked_for_are_read_and_their_pages_given_back(tmp_path, monkeypatch):
    np.save(tmp_path / "long rows.npy", np.zeros((11, 5000)))
    array = open_array(tmp_path / "long rows.npy")
    read, dropped = [], []
    original = array._source.read
    monkeypatch.setattr(array._source, "read", lambda a, b, out: (read.append((a, b)), original(a, b, out)))
    monkeypatch.setattr(array._source, "drop", lambda a, b: dropped.append((a, b)))

    array[3]
    array[4:6]
    array[[9, 1, 2]]

    assert read == dropped == [(3, 4), (4, 6), (1, 3), (9, 10)]


def test_iteration_goes_by_blocks(tmp_path):
    whole = np.arange(11 * 60_000.0).reshape(11, 60_000)
    np.save(tmp_path / "long rows.npy", whole)

    rows = list(open_array(tmp_path / "long rows.npy"))

    assert len(rows) == 11
    same(np.stack(rows), whole)


def test_numpy_can_load_it_whole(path):
    array = open_array(path)

    same(np.asarray(array), WHOLE)
    same(np.asarray(array, dtype="f8"), WHOLE.astype("f8"))
    assert float(np.mean(array)) == WHOLE.mean()
    with pytest.raises(ValueError, match="always a copy"):
        array.__array__(copy=False)


def test_it_is_closed_by_with_and_opened_again(path):
    with open_array(path) as array:
        same(array[1], WHOLE[1])
    same(array[1], WHOLE[1])


def test_what_was_read_belongs_to_the_caller(path):
    array = open_array(path)

    array[2:4][...] = 0

    same(array[2:4], WHOLE[2:4])


def test_other_orders_and_dtypes(tmp_path):
    for whole in (np.asfortranarray(WHOLE), WHOLE.astype(">f8"), WHOLE[:, 0, 0], WHOLE[:0], WHOLE > 3):
        np.save(tmp_path / "x.npy", whole)
        array = open_array(tmp_path / "x.npy")
        native = whole.astype(whole.dtype.newbyteorder("="))
        same(array[2:5], native[2:5])
        same(array[::-2], native[::-2])
        same(np.asarray(array), native)
        same(array[-1:], native[-1:])


def test_arrays_of_npz_files(tmp_path):
    np.savez(tmp_path / "u.npz", x=WHOLE, y=WHOLE[:3])
    np.savez_compressed(tmp_path / "c.npz", x=WHOLE)

    same(open_array(tmp_path / "u.npz", key="y")[[2, 0]], WHOLE[[2, 0]])
    same(open_array(tmp_path / "u.npz", key="x")[2:4], WHOLE[2:4])
    same(open_array(tmp_path / "c.npz")[[7, 2]], WHOLE[[7, 2]])
    with pytest.raises(BadInput, match=r"u\.npz' has several arrays: 'x', 'y'\. Choose one with key="):
        open_array(tmp_path / "u.npz")
    with pytest.raises(BadInput, match="has no array 'z'"):
        open_array(tmp_path / "u.npz", key="z")


def test_columns_of_structured_arrays(tmp_path):
    whole = np.zeros(5, [("a", "f4"), ("b", "i2")])
    whole["b"] = np.arange(5)
    np.save(tmp_path / "s.npy", whole)

    same(open_array(tmp_path / "s.npy", key="b")[1:3], whole["b"][1:3])
    with pytest.raises(BadInput, match="has several arrays: 'a', 'b'"):
        open_array(tmp_path / "s.npy")


def test_datasets_of_hdf5_files(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("group/x", data=WHOLE, chunks=(4, 3, 4), compression="gzip")
        file["y"] = WHOLE[:, 0, 0]

    array = open_array(tmp_path / "a.h5", key="group/x")

    same(array[3:9], WHOLE[3:9])
    same(array[[10, 0, 5], 1], WHOLE[[10, 0, 5], 1])


def test_remote_arrays():
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://memfit-array/x.npy", "wb") as file:
        np.save(file, WHOLE)

    same(open_array("memory://memfit-array/x.npy")[[7, 2], ..., 1], WHOLE[[7, 2], ..., 1])


def test_what_is_no_array_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("a\n1\n")

    with pytest.raises(BadInput, match=r"a\.csv' is a csv file, .* memfit\.stream gives it batch by batch"):
        open_array(tmp_path / "a.csv")
    with pytest.raises(BadFile, match=r"there is no .*a\.cvs'; did you mean 'a\.csv'"):
        open_array(tmp_path / "a.cvs")
    with pytest.raises(BadInput, match="file is needed, and 3 was given"):
        open_array(3)

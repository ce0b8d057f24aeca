"""Files of tensors are safetensors files; those that are damaged or lie are refused."""

import json
import os

import numpy as np
import pytest

from memfit.core import tensor_file
from memfit.core.guarding import BadCheckpoint
from memfit.core.tensor_file import TensorFile, array_entry


def write(path, arrays):
    tensor_file.write(path, [array_entry(name, array) for name, array in arrays.items()])


@pytest.mark.parametrize("dtype", tensor_file.FORMAT)
def test_every_type_comes_back_to_the_bit(tmp_path, dtype):
    dtype = tensor_file.numpy_dtype(dtype)
    values = np.random.default_rng(0).integers(0, 2 if dtype.kind == "b" else 256, 24, np.uint8).view(dtype)
    write(tmp_path / "x", {"a": values.reshape(-1, 1), "b": values[:0], "c": values[::2]})
    file = TensorFile(tmp_path / "x")

    assert (file.dtype("a"), file.shape("a")) == (dtype.name, (len(values), 1))
    assert file.read("a").tobytes() == values.tobytes()
    assert file.read("a").dtype == dtype
    assert file.read("b").shape == (0,)
    assert file.read("c").tobytes() == values[::2].tobytes()


def test_the_library_of_the_format_reads_it(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    arrays = {"a": np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2], "b": np.array(7), "c": np.zeros((0, 3))}
    arrays |= {"d": np.array([True]), "big": np.arange(3, dtype=">i4")}
    write(tmp_path / "x", arrays)

    loaded = library.load_file(tmp_path / "x")
    assert all(np.array_equal(loaded[name], array) for name, array in arrays.items())
    assert np.array_equal(TensorFile(tmp_path / "x").read("big", np.dtype(">i4")), arrays["big"])


def test_a_type_that_the_format_lacks_is_stored_as_bytes(tmp_path):
    write(tmp_path / "x", {"a": np.array([1j, 2], np.complex128)})
    file = TensorFile(tmp_path / "x")

    assert (file.dtype("a"), file.shape("a")) == ("uint8", (2, 16))
    assert file.read("a", np.dtype("complex128")).tolist() == [1j, 2]
    with pytest.raises(BadCheckpoint, match="holds 'a' as uint8, and float64 was expected"):
        file.read("a", np.dtype("float64"))
    with pytest.raises(BadCheckpoint, match="lacks 'b'"):
        file.shape_as("b", "float64", 8)


def test_an_entry_of_another_size_than_it_says_is_refused(tmp_path):
    entry = tensor_file.TensorEntry("a", "float32", (3,), 4, lambda: [b"1234"])
    with pytest.raises(BadCheckpoint, match="a has 4 bytes"):
        tensor_file.write(tmp_path / "x", [entry])


@pytest.mark.parametrize("name", ["object", "string", "no_type", "<M8[s]"])
def test_types_without_numbers_are_refused(name):
    with pytest.raises(BadCheckpoint, match="is not a dtype that a checkpoint can hold"):
        tensor_file.numpy_dtype(name)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "invalid length"),
        (b"\x00" * 8, "invalid length"),
        (b"\xff" * 40, "invalid length"),
        (b"\x02\0\0\0\0\0\0\0[]", "safetensors"),
        (b"\x02\0\0\0\0\0\0\0{]", "safetensors"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "safetensors"),
    ],
)
def test_what_is_no_tensor_file_is_refused(tmp_path, content, reason):
    (tmp_path / "a").write_bytes(content)

    with pytest.raises(BadCheckpoint, match=reason):
        TensorFile(tmp_path / "a")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]},
        {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        "F32",
    ],
)
def test_headers_that_lie_are_refused(tmp_path, entry):
    header = json.dumps({"x": entry}).encode()
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))

    with pytest.raises(BadCheckpoint, match="is no safetensors file, or is damaged"):
        TensorFile(tmp_path / "a")


def test_a_missing_file_and_one_cut_after_it_was_opened(tmp_path):
    with pytest.raises(BadCheckpoint, match="can't be read"):
        TensorFile(tmp_path / "a")
    write(tmp_path / "a", {"x": np.ones(100, np.float32)})
    file = TensorFile(tmp_path / "a")
    os.truncate(tmp_path / "a", 200)

    with pytest.raises(BadCheckpoint, match="ends in the middle of 'x'"):
        file.read("x")

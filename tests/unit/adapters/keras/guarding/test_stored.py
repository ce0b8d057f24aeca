"""Arrays and plain data of checkpoints."""

import json

import numpy as np
import pytest

from memfit.adapters.keras.guarding.stored import ArrayFile, Entry, Plain, write_arrays
from memfit.core.guarding import BadCheckpoint


def entries(arrays):
    return [Entry(name, array.shape, array.dtype.name, lambda array=array: array) for name, array in arrays.items()]


def test_arrays_come_back_to_the_bit(tmp_path):
    arrays = {
        "a": np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
        "b": np.array(7, np.int64),
        "c": np.zeros((0, 3)),
        "d": np.array([True, False]),
    }
    write_arrays(tmp_path / "x", entries(arrays))
    file = ArrayFile(tmp_path / "x")

    assert file.names() == list(arrays)
    assert "a" in file
    assert file.describe("a") == ("float32", (3, 2))
    for name, array in arrays.items():
        assert np.array_equal(file.read(name), array)
        assert file.read(name).dtype == array.dtype


def test_bfloat16_comes_back(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    write_arrays(tmp_path / "x", entries({"a": array}))

    assert np.array_equal(ArrayFile(tmp_path / "x").read("a"), array)


def test_what_is_no_such_file_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"\xff" * 20)

    with pytest.raises(BadCheckpoint, match="is no safetensors file, or is damaged"):
        ArrayFile(tmp_path / "x")
    with pytest.raises(BadCheckpoint, match="can't be read"):
        ArrayFile(tmp_path / "y")
    with pytest.raises(BadCheckpoint, match="complex64, which a checkpoint can't hold"):
        write_arrays(tmp_path / "z", entries({"a": np.zeros(2, np.complex64)}))


def test_a_file_that_ends_too_early_is_refused(tmp_path):
    write_arrays(tmp_path / "x", entries({"a": np.arange(10.0)}))
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:-8])

    with pytest.raises(BadCheckpoint, match="'a' lies outside of the file"):
        ArrayFile(tmp_path / "x")


def test_plain_data_come_back_with_their_types():
    value = {"a": [1, 2.5, None, "x", True], "b": (1, float("inf")), "c": np.float32(0.1), "d": {"e": b"\x00"}}
    plain = Plain()
    encoded = json.loads(json.dumps(plain.encode({**value, "f": np.arange(3)}, "v")))
    decoded = Plain(plain.arrays).decode(encoded)

    assert list(plain.arrays) == ["v.f"]
    assert np.array_equal(decoded.pop("f"), np.arange(3))
    assert decoded == value
    assert type(decoded["c"]) is np.float32


def test_what_is_not_plain_is_refused():
    with pytest.raises(TypeError, match=r"v\.a is a object"):
        Plain().encode({"a": object()}, "v")

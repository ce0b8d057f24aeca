"""Columns of Arrow become arrays of NumPy, or are refused."""

from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from memfit.core.errors import BadFile, BadInput
from memfit.data.sources.arrow_columns import BatchReader, describe_type, find_classes
from memfit.data.sources.table_fields import choose_fields

pa = pytest.importorskip("pyarrow")


def described(column: Any) -> Any:
    return describe_type("c", column.type, column)


def put(column: Any, *, labels: bool = False, classes: tuple[str, ...] = (), row: int = 0) -> Any:
    batch = pa.record_batch({"c": column, "other": pa.array(np.zeros(len(column)))})
    table = [described(column), describe_type("other", pa.float64())]
    parts = choose_fields(table, columns=["other"] if labels else ["c"], labels=["c"] if labels else None, source="t")
    out = [np.empty((len(column), *part.field.shape), part.field.dtype) for part in parts]
    BatchReader("t", table, parts, classes).put(batch, row, out)
    return out[-1]


@pytest.mark.parametrize(
    ("column", "dtype", "shape"),
    [
        (pa.array([1, 2], pa.int8()), "int8", ()),
        (pa.array([True, False]), "bool", ()),
        (pa.array([Decimal("1.5")]), "float64", ()),
        (pa.array([[1, 2, 3]], pa.list_(pa.uint8())), "uint8", (3,)),
        (pa.array([[[1.0], [2.0]]], pa.large_list(pa.list_(pa.float32(), 1))), "float32", (2, 1)),
        (pa.array([1, 2]).dictionary_encode(), "int64", ()),
    ],
)
def test_kinds_of_numbers(column: Any, dtype: str, shape: tuple[int, ...]) -> None:
    found = described(column)
    assert (found.dtype, found.shape, found.is_text) == (np.dtype(dtype), shape, False)


@pytest.mark.parametrize(
    ("column", "is_text"),
    [
        (pa.array(["a"]), True),
        (pa.array(["a"], pa.large_string()), True),
        (pa.array(["a"]).dictionary_encode(), True),
        (pa.array([["a"]]), False),
        (pa.array([b"a"]), False),
        (pa.array([{"a": 1}]), False),
        (pa.array([None], pa.list_(pa.int8())), False),
        (pa.array([0], pa.timestamp("s")), False),
    ],
)
def test_kinds_that_are_no_numbers(column: Any, is_text: bool) -> None:
    found = described(column)
    assert found.dtype is None
    assert found.is_text == is_text
    assert found.stored_as


def test_values() -> None:
    assert put(pa.array([Decimal("1.5"), Decimal("2.5")]))[:, 0].tolist() == [1.5, 2.5]
    assert put(pa.array([7, 8, 7]).dictionary_encode())[:, 0].tolist() == [7, 8, 7]
    assert put(pa.array([True, False]), labels=True).tolist() == [1, 0]
    assert put(pa.array([[[1, 2]], [[3, 4]]])).tolist() == [[[1, 2]], [[3, 4]]]
    np.testing.assert_array_equal(put(pa.array([[1.0, None], [3.0, 4.0]])), [[1, np.nan], [3, 4]])


def test_slices_of_lists() -> None:
    lists = pa.array([[1, 2], [3, 4], [5, 6], [7, 8]])
    assert put(lists.slice(1, 2)).tolist() == [[3, 4], [5, 6]]
    fixed = pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2))
    assert put(fixed.slice(1)).tolist() == [[3, 4], [5, 6]]


@pytest.mark.parametrize("inner", [pa.list_(pa.int32(), 2), pa.list_(pa.int32()), pa.large_list(pa.int32())])
@pytest.mark.parametrize("make", [lambda kind: pa.list_(kind, 3), pa.list_, pa.large_list])
def test_slices_of_lists_of_lists(inner: Any, make: Any) -> None:
    values = np.arange(4 * 3 * 2).reshape(4, 3, 2)
    lists = pa.array(values.tolist(), make(inner))
    assert put(lists.slice(1, 2)).tolist() == values[1:3].tolist()


def test_tensors_keep_their_shape() -> None:
    values = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    assert put(tensors).tolist() == values.tolist()
    assert put(tensors.slice(1)).tolist() == values[1:].tolist()
    turned = pa.fixed_shape_tensor(pa.float32(), [3, 2], permutation=[1, 0])
    assert describe_type("c", turned).dtype is None


def test_class_numbers() -> None:
    words = pa.array(["v", "u", "v"])
    assert put(words, labels=True, classes=("u", "v")).tolist() == [1, 0, 1]
    assert put(words.dictionary_encode(), labels=True, classes=("u", "v")).tolist() == [1, 0, 1]
    with pytest.raises(BadFile, match="column 'c' of t has a new value in row 101"):
        put(words, labels=True, classes=("v",), row=100)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array([1, None]), "column 'c' of t lacks a number in row 11"),
        (pa.array([True, None]), "lacks a number in row 11"),
        (pa.array([[1, 2], None]), "lacks a list in row 11"),
        (pa.array([[1, 2], [3, None]]), "lacks a number in row 11"),
        (pa.array([[1, 2], [3]]), "is ragged: row 11 has a list of 1, and row 0 one of 2"),
        (pa.array([[[1], [2]], [[3], [4, 5]]]), "is ragged: row 11 has a list of 2, and row 0 one of 1"),
    ],
)
def test_gaps_and_ragged_lists(column: Any, said: str) -> None:
    with pytest.raises(BadInput) as raised:
        put(column, row=10)
    assert said in str(raised.value)


def test_classes_are_found_batch_by_batch() -> None:
    batches = [pa.record_batch({"c": pa.array(words)}) for words in (["v", "u", None], ["w", "u", "v"])]
    assert find_classes(batches, "c", "t") == ("u", "v", "w")
    encoded = [pa.record_batch({"c": pa.array(["z", "y"]).dictionary_encode()})]
    assert find_classes(encoded, "c", "t") == ("y", "z")


def test_too_many_classes_are_given_up_early() -> None:
    def batches() -> Any:
        yield pa.record_batch({"c": pa.array([str(number) for number in range(65_537)])})
        pytest.fail("went on after there were too many")

    with pytest.raises(BadInput, match="more than 65,536 different strings"):
        find_classes(batches(), "c", "t")

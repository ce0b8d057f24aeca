"""Columns of tables become fields, and arrays of NumPy, or are refused."""

from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from memfit.core.errors import BadFile, BadInput
from memfit.data.sources.tables import (
    MOST_CLASSES,
    Column,
    TableSource,
    UnusableColumns,
    choose_fields,
    describe_type,
    describe_unknown,
    fill,
    find_classes,
    sort_classes,
)

pa = pytest.importorskip("pyarrow")


def column(name: str, dtype: str | None = "float32", shape: tuple[int, ...] = (), *, is_text: bool = False) -> Column:
    return Column(name, None if dtype is None else np.dtype(dtype), shape, is_text, stored_as=dtype or "string")


TABLE = [
    column("age", "int16"),
    column("height", "float32"),
    column("photo", "uint8", (4, 4)),
    column("species", None, is_text=True),
    column("born", None),
    column("is_wild", "bool"),
]


def test_numbers_become_one_matrix_and_arrays_fields_of_their_own() -> None:
    parts = choose_fields(TABLE, columns=["height", "photo", "age"], labels="species", source="t")
    assert [(part.field.name, part.field.dtype.name, part.field.shape, part.columns) for part in parts] == [
        ("features", "float32", (2,), (1, 0)),
        ("photo", "uint8", (4, 4), (2,)),
        ("species", "int64", (), (3,)),
    ]
    assert [part.field.is_label for part in parts] == [False, False, True]
    assert [part.field.is_tabular for part in parts] == [True, False, False]
    assert [part.has_classes for part in parts] == [False, False, True]


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (["uint8", "int16", "float16", "bool"], "float32"),
        (["float32", "float32"], "float32"),
        # 2**24 + 1 doesn't fit into single precision.
        (["int32", "float32"], "float64"),
        (["uint8", "float64"], "float64"),
        (["int64"], "float64"),
    ],
)
def test_type_of_the_matrix_holds_every_value(dtypes: list[str], expected: str) -> None:
    table = [column(f"c{number}", dtype) for number, dtype in enumerate(dtypes)]
    assert choose_fields(table, columns=None, labels=None, source="t")[0].field.dtype == expected


def test_labels_leave_the_features() -> None:
    parts = choose_fields(TABLE[:2], columns=["age", "height"], labels="age", source="t")
    assert [(part.field.name, part.columns, part.field.dtype.name) for part in parts] == [
        ("features", (1,), "float32"),
        ("age", (0,), "int16"),
    ]
    parts = choose_fields([TABLE[0], TABLE[5]], columns=None, labels="is_wild", source="t")
    assert parts[1].field.dtype == np.int64


def test_array_called_features_keeps_its_name() -> None:
    parts = choose_fields([column("features", shape=(3,)), column("a")], columns=None, labels=None, source="t")
    assert [part.field.name for part in parts] == ["numbers", "features"]


@pytest.mark.parametrize(
    ("columns", "labels", "said"),
    [
        (["hieght"], None, "t has no column 'hieght' (did you mean 'height'?). It has: 'age', 'height'"),
        (["age"], "spezies", "'spezies' (did you mean 'species'?)"),
        (["zzz"], None, "t has no column 'zzz'. It has:"),
        (None, None, "'species' of t is text, which can't be features. Leave out with --columns (columns="),
        (["age", "born"], None, "'born' (string) of t can't be features"),
        (["age"], "born", "column 'born' of t (string) can't be labels"),
        (["age", "age"], None, "columns names 'age' more than once"),
        ([], None, "columns names no column"),
        (["age"], "age", "no column of t is left for features"),
        ([3], None, "columns must be names of columns, and 3 is not a string"),
    ],
)
def test_names_and_columns_that_cannot_be_used(columns: list[str] | None, labels: str | None, said: str) -> None:
    with pytest.raises(BadInput) as raised:
        choose_fields(TABLE, columns=columns, labels=labels, source="t")
    assert said in str(raised.value)


def test_two_columns_of_one_name() -> None:
    with pytest.raises(BadInput, match="more than one column named 'a'"):
        choose_fields([column("a"), column("a")], columns=None, labels=None, source="t")


def test_many_names_are_not_all_listed() -> None:
    assert describe_unknown(["x"], [f"column {n}" for n in range(100)], "column", "t").endswith("and 60 more.")


def test_classes_are_sorted_and_limited() -> None:
    assert sort_classes(["owl", "cat", "owl"], "c", "t") == ("cat", "owl")
    with pytest.raises(BadInput, match="column 'c' of t has more than 65,536 different strings"):
        sort_classes((str(number) for number in range(MOST_CLASSES + 1)), "c", "t")


def test_fill_puts_columns_side_by_side() -> None:
    values = [np.arange(20_000), np.arange(20_000) * 0.5, np.arange(20_000, dtype=np.uint8)]
    out = np.empty((20_000, 3), np.float32)
    fill(out, values)
    np.testing.assert_array_equal(out, np.stack(values, 1).astype(np.float32))


def test_fill_reshapes_single_columns() -> None:
    matrix, vector, images = np.empty((5, 1)), np.empty(5, np.int64), np.empty((5, 2, 2), np.uint8)
    fill(matrix, [np.arange(5)])
    fill(vector, [np.arange(5) > 2])
    fill(images, [np.arange(20).reshape(5, 2, 2)])
    assert matrix[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert vector.tolist() == [0, 0, 0, 1, 1]
    assert images.reshape(-1).tolist() == list(range(20))


def test_what_could_be_used_is_told() -> None:
    table = [column("a"), column("b", None, is_text=True), column("c", None), column("d", shape=(2,))]
    with pytest.raises(UnusableColumns, match=r"'b' of t is text.*'c' \(string\) of t can't be features") as caught:
        choose_fields(table, columns=None, labels=None, source="t")
    assert caught.value.usable == ("a", "d")


def described(column: Any) -> Any:
    return describe_type("c", column.type, column)


def put(column: Any, *, labels: bool = False, classes: tuple[str, ...] = (), row: int = 0) -> Any:
    batch = pa.record_batch({"c": column, "other": pa.array(np.zeros(len(column)))})
    table = [described(column), describe_type("other", pa.float64())]
    columns, label = (["other"], "c") if labels else (["c"], None)
    source = TableSource(__file__)
    source.name = "t"
    source._choose(table, columns=columns, labels=label, batches=lambda place: (), classes=classes)
    out = [np.empty((len(column), *field.shape), field.dtype) for field in source.fields]
    source._put(batch, row, out)
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
    with pytest.raises(BadFile, match="column 'c' of 't' has a new value in row 101"):
        put(words, labels=True, classes=("v",), row=100)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array([1, None]), "column 'c' of 't' lacks a number in row 11"),
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

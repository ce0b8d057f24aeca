from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.core.errors import BadInput
from memfit.data import precision
from memfit.data.precision import Converter, Statistics, parse_dtype, target_dtypes
from memfit.data.source import Field


def converted(values, dtype, *, start=0):
    values = np.asarray(values)
    field = Field("x", values.dtype, values.shape[1:])
    converter = Converter(field, np.dtype(dtype))
    out = np.empty(values.shape, dtype)
    converter.run(start, values, out)
    return out, converter.statistics


def test_values_are_those_of_astype_and_errors_those_of_the_definition():
    values = np.random.default_rng(0).standard_normal((70_000, 3)) * 1000

    out, found = converted(values, "float32")

    assert np.array_equal(out, values.astype("float32"))
    error = np.abs(values - out.astype("float64"))
    assert found.max_absolute_error == error.max()
    assert found.max_relative_error == (error / np.abs(values)).max()
    assert 0 < found.max_relative_error <= 2.0**-24
    assert (found.minimum, found.maximum) == (values.min(), values.max())
    assert found.num_values == values.size
    assert found.num_overflow == found.num_zeroed == found.num_subnormal == found.num_nan == 0


def test_what_was_no_number_before_is_counted_and_kept():
    out, found = converted([1.0, np.nan, np.inf, -np.inf, 2.5], "float32")

    assert np.array_equal(out, np.array([1, np.nan, np.inf, -np.inf, 2.5], "f4"), equal_nan=True)
    assert (found.num_nan, found.num_infinite, found.num_overflow) == (1, 2, 0)
    assert (found.minimum, found.maximum) == (1.0, 2.5)


def test_large_values_are_counted_with_the_first_of_them():
    values = np.zeros((40_000, 2))
    values[30_000, 1] = -1e300
    values[39_999, 0] = 1e39

    _, found = converted(values, "float32", start=100)

    assert found.num_overflow == 2
    assert found.first_overflow == [30_100, "-1e+300"]
    assert found.minimum == -1e300


def test_small_values_are_counted_and_not_taken_for_relative_errors():
    values = np.array([0.0, 1e-42, 1e-300, -1e-50, 1.0, 1 / 3])

    _, found = converted(values, "float32")

    assert (found.num_zeroed, found.num_subnormal) == (2, 1)
    assert found.max_relative_error == abs(1 / 3 - float(np.float32(1 / 3))) * 3


def test_the_largest_value_of_a_type_is_no_overflow():
    limit = float(np.finfo("float16").max)

    _, found = converted([limit, -limit, limit + 1], "float16")

    assert found.num_overflow == 0
    assert found.max_absolute_error == 1.0


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=40))
def test_any_values_are_counted_as_by_plain_formulas(given_values):
    values = np.array(given_values)
    with np.errstate(all="ignore"):
        expected = values.astype("float16")

    out, found = converted(values, "float16")

    finite = np.isfinite(values)
    tiny = np.finfo("float16").tiny
    wide = expected.astype("float64")
    assert np.array_equal(out, expected, equal_nan=True)
    assert found.num_nan == np.isnan(values).sum()
    assert found.num_infinite == np.isinf(values).sum()
    assert found.num_overflow == (finite & ~np.isfinite(wide)).sum()
    assert found.num_zeroed == (finite & (values != 0) & (wide == 0)).sum()
    assert found.num_subnormal == (finite & (wide != 0) & (np.abs(wide) < tiny)).sum()
    stays = finite & np.isfinite(wide)
    assert found.max_absolute_error == np.abs(values[stays] - wide[stays]).max(initial=0)
    assert found.minimum == (values[finite].min() if finite.any() else None)


def test_a_wider_type_or_the_same_loses_nothing():
    for dtype in ("float64", "float32"):
        out, found = converted(np.array([1.5, np.nan, np.inf], "float32"), dtype)
        assert out.dtype == dtype
        assert (found.num_nan, found.num_infinite, found.max_absolute_error) == (1, 1, 0.0)
        assert (found.minimum, found.maximum) == (1.5, 1.5)


def test_nothing_but_nan_has_no_extremes():
    for dtype in ("float64", "float32"):
        _, found = converted([np.nan, np.nan], dtype)
        assert (found.num_nan, found.minimum, found.maximum) == (2, None, None)


def test_text_is_passed_on():
    out, found = converted(np.array(["a", "bc"]), "<U2")

    assert out.tolist() == ["a", "bc"]
    assert found.minimum is None


@pytest.mark.parametrize(
    ("values", "before", "after", "message"),
    [
        ([1, 300], "int64", "uint8", "sample 8 holds 300, and uint8 holds 0 to 255"),
        ([1, -1], "int64", "uint8", "sample 8 holds -1"),
        ([0, 2**24 + 1], "int64", "float32", "sample 8 holds 16777217, and float32 would round it"),
        ([0, 2**63 - 1], "int64", "float64", "sample 8 holds 9223372036854775807"),
        ([0, 2**64 - 1], "uint64", "float64", "sample 8 holds 18446744073709551615"),
        ([0, 70_000], "int32", "float16", "sample 8 holds 70000"),
    ],
)
def test_integers_that_do_not_fit_are_refused(values, before, after, message):
    with pytest.raises(BadInput, match="integers are never changed") as raised:
        converted(np.array(values, before), after, start=7)
    assert message in str(raised.value)


@pytest.mark.parametrize(("before", "after"), [("int64", "int8"), ("int64", "float16"), ("bool", "float32")])
def test_integers_that_fit_are_converted(before, after):
    values = np.array([0, 1, 100], before)

    out, _ = converted(values, after)

    assert out.tolist() == values.tolist()


def test_statistics_survive_json():
    import json

    _, found = converted([1e300, 0.1, np.nan, 1e-300], "float32")

    again = Statistics(**json.loads(json.dumps(asdict(found))))

    assert again == found
    for dtype in ("g", "i8", "f2"):
        converter = Converter(Field("x", np.dtype(dtype), ()), np.dtype(dtype))
        converter.run(0, np.arange(3).astype(dtype), np.empty(3, dtype))
        assert json.loads(json.dumps(asdict(converter.statistics)))["maximum"] == 2


def fields(*dtypes, label=None):
    return tuple(Field(name, np.dtype(dtype), (), name == label) for name, dtype in zip("abcd", dtypes, strict=False))


def test_floating_types_are_for_floating_fields():
    found = target_dtypes(fields("f8", "u1", "i8", label="c"), np.dtype("f4"))

    assert [dtype.str for dtype in found] == ["<f4", "|u1", "<i8"]


def test_integer_features_become_floating_where_nothing_else_can_be_meant():
    found = target_dtypes(fields("u1", "i8", label="b"), np.dtype("f4"))

    assert [dtype.str for dtype in found] == ["<f4", "<i8"]


def test_integer_types_are_for_features():
    found = target_dtypes(fields("i8", "i8", label="b"), np.dtype("i2"))

    assert [dtype.str for dtype in found] == ["<i2", "<i8"]
    assert [dtype.str for dtype in target_dtypes(fields("f8"), None)] == ["<f8"]


def test_floating_features_do_not_become_integers():
    with pytest.raises(BadInput, match="cut off all digits after the decimal point"):
        target_dtypes(fields("f8"), np.dtype("i4"))


@pytest.mark.parametrize("given_dtype", ["foo", "object", "U3", "complex64", 3.5, "datetime64[s]", "f4,f4", ""])
def test_other_types_are_refused(given_dtype):
    with pytest.raises(BadInput, match="is not a type of numbers"):
        parse_dtype(given_dtype)


def test_types_are_in_the_order_of_this_machine():
    assert parse_dtype(">f4") == np.dtype("=f4")
    assert parse_dtype(None) is None


def test_pieces_are_smaller_than_the_blocks_that_are_tested():
    assert precision._PIECE < 40_000

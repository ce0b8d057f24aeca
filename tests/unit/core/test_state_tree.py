"""Plain data comes back as it was, to the type and the bit; everything else is refused by name."""

import itertools
import json
import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from functools import partial

import numpy
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from memfit.core import tensor_file
from memfit.core.guarding import BadCheckpoint
from memfit.core.state_tree import Decoder, Encoder


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("tree")


def round_trip(value, directory, **options):
    encoder = Encoder(**options)
    text = json.dumps(encoder.encode(value, "top"), allow_nan=False)
    tensor_file.write(directory / "a", itertools.starmap(tensor_file.array_entry, encoder.tensors.items()))
    return Decoder(tensor_file.TensorFile(directory / "a")).decode(json.loads(text))


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats()
    | st.binary()
    | st.complex_numbers()
    | st.sampled_from([numpy.float64(0.1), numpy.int8(-3), numpy.bool_(True)])
)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.sampled_from(["__tuple__", "__x"])


def shown(value):
    """Tells 1 from 1.0 and True, a tuple from a list, and is the same for two that are no numbers."""
    kind = type(value).__name__
    if isinstance(value, set | frozenset):
        return kind, sorted(map(repr, value))
    if isinstance(value, dict):
        return kind, [(repr(key), shown(inner)) for key, inner in value.items()]
    if isinstance(value, list | tuple | deque):
        return kind, [shown(inner) for inner in value]
    return kind, repr(value)


@examples(max_examples=150)
@given(
    st.recursive(
        LEAVES,
        lambda inner: (
            st.lists(inner)
            | st.lists(inner).map(tuple)
            | st.dictionaries(KEYS, inner)
            | st.dictionaries(KEYS, inner).map(OrderedDict)
            | st.lists(inner).map(deque)
            | st.sets(st.integers())
            | st.frozensets(st.text())
        ),
        max_leaves=12,
    )
)
def test_any_plain_data_comes_back(directory, value):
    back = round_trip(value, directory)

    assert shown(back) == shown(value)


@pytest.mark.parametrize(
    "value",
    [
        Counter({30: 1, 80: 2}),
        bytearray(b"ab"),
        deque([1, 2], maxlen=5),
        [-0.0, math.inf, -math.inf],
        2**4000,
        {"a": {"b": (1, [2, (3,)])}},
    ],
)
def test_types_are_kept(directory, value):
    back = round_trip(value, directory)

    assert back == value
    assert type(back) is type(value)
    assert getattr(back, "maxlen", 0) == getattr(value, "maxlen", 0)


@pytest.mark.parametrize("dtype", [numpy.uint32, numpy.float64, numpy.float16, numpy.bool_, numpy.complex128, ">i4"])
def test_arrays_come_back(directory, dtype):
    value = numpy.arange(6).reshape(2, 3).astype(dtype)
    back = round_trip({"a": value, "empty": value[:0]}, directory)

    assert back["a"].dtype == value.dtype
    numpy.testing.assert_array_equal(back["a"], value)
    assert back["empty"].shape == (0, 3)


def test_arrays_of_types_that_numpy_lacks_come_back(directory):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        back = round_trip(numpy.array([[1.5], [-2.0]], dtype), directory)
        assert back.dtype == dtype
        assert back.tolist() == [[1.5], [-2.0]]
        assert type(round_trip(dtype(1.5), directory)) is dtype


def test_functions_are_left_out_where_that_is_wanted(directory):
    value = {"a": 1, "f": len, "g": partial(max, 1), "list": [lambda: 0], "keys": {1: math.sin, 2: 3}}

    assert round_trip(value, directory, skips_functions=True) == {"a": 1, "list": [None], "keys": {2: 3}}
    with pytest.raises(BadCheckpoint, match=r"^x\.f is a builtins\.builtin_function_or_method"):
        Encoder().encode(value, "x")


@dataclass
class Odd:
    number: int = 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0, Odd()]}, r"^x\.a\.1 is a .*Odd, which a checkpoint can't hold"),
        ({"a": numpy.array([object()])}, r"^x\.a is a numpy\.ndarray"),
        ({"a": numpy.datetime64("2026-01-01")}, r"^x\.a is a numpy\.datetime64"),
        ({Odd: 1}, r"^x\.<key> is a builtins\.type"),
        (object(), r"^x is a builtins\.object"),
    ],
)
def test_what_is_no_plain_data_is_refused_by_name(value, message):
    with pytest.raises(BadCheckpoint, match=message):
        Encoder().encode(value, "x")


@pytest.mark.parametrize(
    "tree",
    [
        {"__unknown__": 1},
        {"__array__": "x", "dtype": "O"},
        {"__array__": "x", "dtype": "<f8"},
        {"__array__": "gone", "dtype": "<f8"},
        {"__numpy__": ["O", "AAAA"]},
        {"__tuple__": 3},
        {"__dict__": [[1]]},
        {"__bytes__": 3},
        {"__float__": "many"},
    ],
)
def test_trees_that_were_not_made_here_are_refused(tmp_path, tree):
    tensor_file.write(tmp_path / "a", [tensor_file.array_entry("x", numpy.ones((3, 8), numpy.uint8))])

    with pytest.raises(BadCheckpoint):
        Decoder(tensor_file.TensorFile(tmp_path / "a")).decode([tree])

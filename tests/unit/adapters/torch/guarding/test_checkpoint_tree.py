"""Plain data comes back as it was, to the type and the bit; everything else is refused by name."""

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from functools import partial

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from memfit.adapters.torch.guarding.checkpoint_tensors import TensorFile, write_tensors
from memfit.adapters.torch.guarding.checkpoint_tree import Decoder, Encoder, stored_shape
from memfit.core.guarding import BadCheckpoint


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("tree")


def round_trip(value, directory, **options):
    encoder = Encoder(**options)
    text = json.dumps(encoder.encode(value, "top"), allow_nan=False)
    write_tensors(directory / "a", encoder.tensors)
    return Decoder(TensorFile(directory / "a")).decode(json.loads(text))


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats()
    | st.binary()
    | st.complex_numbers()
    | st.sampled_from([torch.float16, torch.device("cpu"), numpy.float64(0.1), numpy.int8(-3), numpy.bool_(True)])
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
        torch.Size([2, 3]),
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


def test_a_dictionary_with_defaults_becomes_a_plain_one(directory):
    back = round_trip(defaultdict(dict, {1: {"a": 2}}), directory)

    assert back == {1: {"a": 2}}
    assert type(back) is dict


@pytest.mark.parametrize("dtype", [numpy.uint32, numpy.float64, numpy.float16, numpy.bool_, numpy.complex128, ">i4"])
def test_arrays_come_back(directory, dtype):
    value = numpy.arange(6).reshape(2, 3).astype(dtype)
    back = round_trip({"a": value, "empty": value[:0]}, directory)

    assert back["a"].dtype == value.dtype
    numpy.testing.assert_array_equal(back["a"], value)
    assert back["empty"].shape == (0, 3)


def test_tensors_come_back_with_type_and_layout(directory):
    value = {
        "image": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(3.0),
        "half": torch.randn(3).bfloat16(),
        "whole": torch.arange(3),
        "wide": torch.randn(2, dtype=torch.complex128),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    back = round_trip(value, directory)

    for name, tensor in value.items():
        assert torch.equal(back[name], tensor), name
        assert back[name].dtype == tensor.dtype
        if name != "expanded":
            assert back[name].stride() == tensor.stride()
        assert not back[name].requires_grad


def test_a_tensor_with_two_names_is_stored_once():
    encoder = Encoder()
    tensor = torch.ones(3)
    encoded = encoder.encode({"a": tensor, "b": tensor, "c": tensor[:2], "d": torch.empty(0), "e": torch.empty(0)}, "x")

    assert list(encoder.tensors) == ["x.a", "x.c", "x.d", "x.e"]
    assert encoded["b"]["__tensor__"] == "x.a"


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
        ({"a": torch.eye(3).to_sparse()}, r"^x\.a is a tensor of layout torch\.sparse_coo"),
        ({"a": torch.empty(3, device="meta")}, r"^x\.a is a tensor without values"),
        ({"a": torch.nn.parameter.UninitializedParameter()}, r"^x\.a is a parameter that has no shape yet"),
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
        {"__tensor__": "gone", "dtype": "float32"},
        {"__tensor__": "x", "dtype": "load"},
        {"__tensor__": "x", "dtype": "int64"},
        {"__array__": "x", "dtype": "O", "shape": [1]},
        {"__numpy__": ["O", "AAAA"]},
        {"__tuple__": 3},
        {"__dict__": [[1]]},
        {"__device__": "nowhere"},
        {"__bytes__": 3},
        {"__float__": "many"},
    ],
)
def test_trees_that_were_not_made_here_are_refused(tmp_path, tree):
    write_tensors(tmp_path / "a", {"x": torch.ones(3)})

    with pytest.raises(BadCheckpoint):
        Decoder(TensorFile(tmp_path / "a")).decode([tree])


def test_shapes_of_types_that_the_format_lacks(tmp_path):
    write_tensors(tmp_path / "a", {"x": torch.ones(3, dtype=torch.complex128)})

    assert stored_shape(TensorFile(tmp_path / "a"), "x", torch.complex128) == (3,)

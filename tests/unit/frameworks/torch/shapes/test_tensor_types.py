import pytest
import torch

from memfit.core.job import AUTOCASTS, PRECISIONS
from memfit.frameworks.torch.shapes.tensor_types import AUTOCAST, WEIGHTS, cuda_type_name, dtype_of_type

LEGACY = [
    ("FloatTensor", torch.float32),
    ("DoubleTensor", torch.float64),
    ("HalfTensor", torch.float16),
    ("BFloat16Tensor", torch.bfloat16),
    ("ByteTensor", torch.uint8),
    ("CharTensor", torch.int8),
    ("ShortTensor", torch.int16),
    ("IntTensor", torch.int32),
    ("LongTensor", torch.int64),
    ("BoolTensor", torch.bool),
]


@pytest.mark.parametrize(("name", "dtype"), LEGACY)
def test_names_are_those_of_pytorch(name, dtype):
    # PyTorch's own name for the host has no "cuda" in it and is the same otherwise.
    assert torch.zeros(1, dtype=dtype).type() == f"torch.{name}"
    assert cuda_type_name(dtype) == f"torch.cuda.{name}"


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn], ids=str)
def test_a_dtype_without_an_old_name_has_one_made_up(dtype):
    assert cuda_type_name(dtype).startswith("torch.cuda.")
    assert cuda_type_name(dtype).endswith("Tensor")


@pytest.mark.parametrize(("name", "dtype"), LEGACY)
def test_a_name_says_device_and_dtype(name, dtype):
    assert dtype_of_type(f"torch.{name}") == ("cpu", dtype)
    assert dtype_of_type(f"torch.cuda.{name}") == ("cuda", dtype)
    assert dtype_of_type(getattr(torch, name)) == ("cpu", dtype)


def test_the_plain_type_has_the_default_dtype():
    assert dtype_of_type(torch.Tensor) == ("cpu", torch.get_default_dtype())
    assert dtype_of_type("torch.Tensor") == ("cpu", torch.get_default_dtype())


@pytest.mark.parametrize("given", ["torch.cuda.NoTensor", "float", int], ids=str)
def test_what_is_no_tensor_type_is_refused_in_pytorchs_words(given):
    with pytest.raises(ValueError, match="invalid type: "):
        dtype_of_type(given)


def test_every_precision_has_a_dtype():
    assert set(AUTOCAST) == set(AUTOCASTS)
    assert {*WEIGHTS, *AUTOCAST} == set(PRECISIONS)


def test_names_say_the_width():
    assert {name[-2:]: dtype.itemsize * 8 for name, dtype in {**WEIGHTS, **AUTOCAST}.items()} == {"16": 16, "32": 32}
    assert AUTOCAST["amp-fp16"] is WEIGHTS["fp16"] is torch.float16

import numpy as np
import pytest
import torch

from memfit.core.job import AUTOCASTS, PRECISIONS
from memfit.frameworks.torch.shapes.tensor_types import AUTOCAST, WEIGHTS, cuda_type_name, dtype_of_type
from tests.unit.frameworks.torch.machines import Shapes, machine

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


def test_a_type_makes_tensors_of_a_size():
    with machine(), Shapes():
        make = torch.cuda.FloatTensor
        for made, shape in (
            (make(8, 1), (8, 1)),
            (make(torch.Size([2, 3])), (2, 3)),
            (make(), (0,)),
            (make(4), (4,)),
        ):
            assert made.shape == shape
            assert made.dtype == torch.float32
            assert made.is_meta


@pytest.mark.parametrize("values", [[1, 2, 3], (1.0, 2.0, 3.0), np.array([1.0, 2.0, 3.0]), torch.ones(3)])
def test_a_type_makes_tensors_of_values(values):
    with machine(), Shapes():
        made = torch.cuda.HalfTensor(values)

        assert (made.shape, made.dtype, made.is_meta) == ((3,), torch.float16, True)


def test_anything_else_is_refused():
    with machine(), pytest.raises(TypeError, match="invalid combination of arguments"):
        torch.cuda.FloatTensor([1], [2])


def test_tensors_can_be_tested_against_a_type():
    with machine(), Shapes():
        assert isinstance(torch.cuda.LongTensor(2), torch.cuda.LongTensor)
        assert not isinstance(torch.cuda.LongTensor(2), torch.cuda.FloatTensor)
        assert not isinstance(torch.zeros(2, dtype=torch.int64), torch.cuda.LongTensor)
        assert not isinstance("text", torch.cuda.LongTensor)


def test_a_type_knows_its_dtype_and_name():
    with machine():
        assert torch.cuda.DoubleTensor.dtype is torch.float64
        assert torch.cuda.BoolTensor.is_cuda
        assert repr(torch.cuda.ByteTensor) == "<class 'torch.cuda.ByteTensor'>"


def test_a_default_device_is_handed_to_the_look():
    with machine() as found:
        assert torch.get_default_device() == torch.device("cpu")
        torch.set_default_device("cuda")
        assert found.device_view.default_device == torch.device("cuda")
        assert torch.get_default_device() == torch.device("cuda", 0)
        torch.set_default_device(None)
        assert found.device_view.default_device is None


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_a_default_type_is_a_default_device_and_dtype():
    with machine() as found:
        torch.set_default_tensor_type("torch.cuda.DoubleTensor")
        try:
            assert found.device_view.default_device == torch.device("cuda")
            assert torch.get_default_dtype() is torch.float64
            with pytest.raises(TypeError, match="only floating-point types"):
                torch.set_default_tensor_type(torch.cuda.LongTensor)
        finally:
            torch.set_default_tensor_type(torch.FloatTensor)

        assert found.device_view.default_device is None
        assert torch.get_default_dtype() is torch.float32

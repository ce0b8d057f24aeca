import numpy as np
import pytest
import torch

from memfit.frameworks.torch.cuda.types import dtype_of_cuda_type
from tests.unit.frameworks.torch.machines import Shapes, machine


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


def test_the_dtype_of_a_type_or_its_name():
    with machine():
        for given in (torch.cuda.BFloat16Tensor, "torch.cuda.BFloat16Tensor"):
            assert dtype_of_cuda_type(given) is torch.bfloat16
    # PyTorch's own type, imported before
    assert dtype_of_cuda_type(torch.cuda.CharTensor) is torch.int8
    for given in (torch.FloatTensor, "torch.FloatTensor", "torch.cuda.NoTensor", torch.float32, torch.cuda.Stream, 3):
        assert dtype_of_cuda_type(given) is None


def test_a_default_device_is_handed_to_the_look():
    with machine() as found:
        assert torch.get_default_device() == torch.device("cpu")
        torch.set_default_device("cuda")
        assert found.look.default_device == torch.device("cuda")
        assert torch.get_default_device() == torch.device("cuda", 0)
        torch.set_default_device(None)
        assert found.look.default_device is None


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_a_default_type_is_a_default_device_and_dtype():
    with machine() as found:
        torch.set_default_tensor_type("torch.cuda.DoubleTensor")
        try:
            assert found.look.default_device == torch.device("cuda")
            assert torch.get_default_dtype() is torch.float64
            with pytest.raises(TypeError, match="only floating-point types"):
                torch.set_default_tensor_type(torch.cuda.LongTensor)
        finally:
            torch.set_default_tensor_type(torch.FloatTensor)

        assert found.look.default_device is None
        assert torch.get_default_dtype() is torch.float32

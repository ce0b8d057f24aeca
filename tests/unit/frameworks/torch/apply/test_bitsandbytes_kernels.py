import importlib

import pytest
import torch

from memfit.core.errors import MissingDependency
from memfit.frameworks.torch.apply import bitsandbytes_kernels as kernels

pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize("num", [256, 4096, 4096 + 17])
@pytest.mark.parametrize("signed", [True, False])
def test_eight_bits_come_back_nearly(num, signed):
    torch.manual_seed(0)
    values = torch.randn(num) if signed else torch.randn(num).square()
    numbers = kernels.table(signed, torch.device("cpu"))
    codes, scales = kernels.quantize_8bit(values, numbers)
    assert codes.dtype is torch.uint8
    assert (codes.shape, scales.shape) == (values.shape, (-(-num // 256),))
    back = kernels.dequantize_8bit(codes, scales, numbers)
    # The steps between the 256 numbers are largest near 1: about 1/64 of the largest magnitude.
    assert (back - values).abs().max() <= values.abs().max() / 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("num", [64, 1000, 5000])
def test_four_bits_come_back_nearly(num, dtype):
    torch.manual_seed(0)
    values = torch.randn(num, dtype=dtype)
    codes, scales = kernels.quantize_4bit(values, part=1024)
    assert (codes.shape, scales.shape) == ((num // 2,), (-(-num // 64),))
    back = kernels.dequantize_4bit(codes, scales, dtype)
    assert back.dtype is dtype
    # The widest gap between two of the 16 numbers is 0.304 of the largest magnitude.
    assert (back.view(-1) - values).abs().max() <= 0.16 * values.abs().max()


def test_parts_do_not_change_the_codes():
    torch.manual_seed(0)
    values = torch.randn(4096)
    for whole, parts in zip(kernels.quantize_4bit(values), kernels.quantize_4bit(values, part=256), strict=True):
        assert torch.equal(whole, parts)


def test_shapes_alone_are_enough():
    values = torch.empty(4096, device="meta")
    numbers = kernels.table(True, torch.device("meta"))
    codes, scales = kernels.quantize_8bit(values, numbers)
    assert kernels.dequantize_8bit(codes, scales, numbers).shape == (4096,)
    assert kernels.dequantize_4bit(*kernels.quantize_4bit(values), torch.float32).shape == (1, 4096)


def test_without_the_package_the_extra_is_named(monkeypatch):
    import_module = importlib.import_module

    def missing(name):
        if name == "bitsandbytes":
            raise ImportError(name)
        return import_module(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    kernels.load.cache_clear()
    with pytest.raises(MissingDependency, match="pip install bitsandbytes"):
        kernels.load()
    monkeypatch.undo()
    assert kernels.load().__name__ == "bitsandbytes"

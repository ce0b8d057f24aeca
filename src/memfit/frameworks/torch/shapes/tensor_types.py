"""The old names of tensor types, `torch.cuda.FloatTensor` and its kin, which say a device and a dtype at once."""

from typing import Any

import torch

DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def cuda_type_name(dtype: torch.dtype) -> str:
    """The type of a CUDA tensor, as `x.type()` gives it.

    >>> cuda_type_name(torch.float32)
    'torch.cuda.FloatTensor'
    """
    name = _NAMES.get(dtype, f"{str(dtype).removeprefix('torch.').capitalize()}Tensor")
    return f"torch.cuda.{name}"


def dtype_of_type(given: Any) -> tuple[str, torch.dtype]:
    """("cuda" or "cpu", dtype) of a tensor type or its name.

    >>> dtype_of_type("torch.cuda.HalfTensor")
    ('cuda', torch.float16)
    >>> dtype_of_type(torch.LongTensor)
    ('cpu', torch.int64)
    """
    text = given if isinstance(given, str) else f"{given.__module__}.{given.__name__}"
    name = text.rpartition(".")[2]
    if name == "Tensor":
        return "cpu", torch.get_default_dtype()
    if name not in DTYPES:
        raise ValueError(f"invalid type: {text!r}")
    return "cuda" if "cuda" in text else "cpu", DTYPES[name]


WEIGHTS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
AUTOCAST = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}

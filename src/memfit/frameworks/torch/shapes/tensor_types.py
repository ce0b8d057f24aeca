"""`torch.cuda.FloatTensor` and its kin: names, constructors and tests of tensors, each of a device and a dtype at once.

Scripts from before 2018 choose a type once, `Tensor = torch.cuda.FloatTensor if cuda else torch.FloatTensor`, and make
all tensors with it. The same age made a type the default of all factories, which goes with PyTorch's newer way of
setting a default device.
"""

from typing import Any

import torch

from memfit.core.patching import Replacement, in_owner
from memfit.frameworks.torch import internals

WEIGHTS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
AUTOCAST = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}

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


def cuda_type_name(dtype: torch.dtype) -> str:
    """The type of a CUDA tensor, as `x.type()` gives it.

    >>> cuda_type_name(torch.float32)
    'torch.cuda.FloatTensor'
    """
    names = (name for name, known in DTYPES.items() if known is dtype)
    return f"torch.cuda.{next(names, str(dtype).removeprefix('torch.').capitalize() + 'Tensor')}"


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


class CudaTensorType(type):
    """The type of such a type: what it makes are ordinary tensors, on the device."""

    dtype: torch.dtype

    def __call__(cls, *data: Any, device: Any = "cuda") -> Any:
        """A tensor of a size, uninitialised, or with the values of a sequence, an array or another tensor."""
        if not data:
            return torch.empty(0, dtype=cls.dtype, device=device)
        if isinstance(data[0], torch.Size) or all(isinstance(size, int) for size in data):
            return torch.empty(*data, dtype=cls.dtype, device=device)
        if len(data) != 1:
            raise TypeError(f"new() received an invalid combination of arguments - got {len(data)}, expected one.")
        if isinstance(data[0], torch.Tensor):
            return data[0].to(device, cls.dtype)
        return torch.tensor(data[0], dtype=cls.dtype, device=device)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == cls.dtype

    def __repr__(cls) -> str:
        return f"<class 'torch.cuda.{cls.__name__}'>"


_SHARED = {"__module__": "torch.cuda", "is_cuda": True, "is_sparse": False, "layout": torch.strided}
_TYPES = {name: CudaTensorType(name, (), {**_SHARED, "dtype": dtype}) for name, dtype in DTYPES.items()}


def type_replacements(look: Any) -> list[Replacement]:
    """The types, and the functions that make a device, `look.default_device`, the default of all factories."""
    plain_set_type: Any = torch.set_default_tensor_type
    plain_get = torch.get_default_device

    def set_default_device(device: Any) -> None:
        # PyTorch's own would put a function mode below the simulation's, where its device comes too late.
        look.default_device = None if device is None else torch.device(device)

    def get_default_device() -> torch.device:
        default = look.default_device if look.default_device is not None else plain_get()
        if default.type == "cuda" and default.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return default

    def set_default_tensor_type(given: Any, /) -> None:
        kind, dtype = dtype_of_type(given)
        look.default_type_is_cuda = kind == "cuda"
        if kind != "cuda":
            look.default_device = None
            plain_set_type(given)
            return
        if not dtype.is_floating_point:
            raise TypeError(f"only floating-point types are supported as the default type, not {given}")
        torch.set_default_dtype(dtype)
        look.default_device = torch.device("cuda")

    def make(cls: Any, *data: Any, **options: Any) -> Any:
        """`torch.Tensor(...)`, another name for the default type: once that is one of CUDA, so is what it makes."""
        made = internals.TensorBase.__new__(cls, *data, **options)
        return made.cuda() if cls is torch.Tensor and look.default_type_is_cuda else made

    return [
        Replacement(torch.Tensor, "__new__", make),
        *in_owner(torch.cuda, _TYPES),
        Replacement(torch, "set_default_device", set_default_device),
        Replacement(torch, "get_default_device", get_default_device),
        Replacement(torch, "set_default_tensor_type", set_default_tensor_type),
    ]

"""What running out of memory looks like in a Keras program on each backend: the one place that knows.

TensorFlow raises `ResourceExhaustedError`, which it also uses for other limits, and now and then an `InternalError`
of CUDA. JAX raises `JaxRuntimeError` from a compiled function and `ValueError` from a single operation, both with
RESOURCE_EXHAUSTED in their text. protobuf, in which TensorFlow keeps its graphs, raises an error of decoding when it
finds no memory for one. Keras on PyTorch raises what PyTorch raises, and `adapters.torch.oom` knows that.
numpy and Python raise `MemoryError` under all of them.
"""

import ctypes
import gc
import math
import re
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from memfit.core.errors import MemfitError
from memfit.core.guarding import OutOfMemory, Where

# Deeper chains of causes are loops or noise.
_MAX_CHAIN = 20
_MEMORY = re.compile(r"\bOOM\b|out of memory|\ballocat|\bmemory\b", re.IGNORECASE)
# TensorFlow's InternalError, UnknownError and the like, which come with everything else, too.
_DEVICE_TEXTS = re.compile(
    r"CUDA_ERROR_OUT_OF_MEMORY|CUDA_OUT_OF_MEMORY|Dst tensor is not initialized|failed to allocate \S+ ?\S* on device|"
    r"Failed to allocate request for|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
_STATUS = "RESOURCE_EXHAUSTED"
# protobuf has no class of its own for it.
_ARENA = "Arena alloc failed"
# A computation that was handed over and then found no memory is INTERNAL, with the reason behind it.
_DISPATCH = re.compile(r"\bout of memory allocating \d+ bytes", re.IGNORECASE)
_BYTES = re.compile(r"allocat\w*(?: request for)? (\d+(?:\.\d+)?) ?(bytes|[KMGT]i?B|B)\b", re.IGNORECASE)
_SHAPE = re.compile(r"tensor with shape ?\[([\d,]*)\] and type (\w+)")
_ITEM_BYTES = {"double": 8, "int64": 8, "float": 4, "int32": 4, "uint32": 4, "half": 2, "bfloat16": 2, "int16": 2}
_FACTORS = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def recognise(error: BaseException) -> OutOfMemory | None:
    """What ran out, if `error` or one that led to it is a failure to get memory; None for everything else.

    >>> recognise(MemoryError()).source
    'python'
    >>> recognise(ValueError("please avoid running out of memory")) is None
    True
    """
    # What ends the program ends it, and memfit's own errors have decided already that nothing is left to try.
    if not isinstance(error, Exception) or isinstance(error, MemfitError):
        return None
    for link in _chain(error):
        failure = _recognise_one(link)
        if failure is not None:
            return failure
    if "torch" in sys.modules:
        from memfit.adapters.torch.oom import recognise as recognise_torch

        return recognise_torch(error)
    return None


def clear(error: BaseException) -> None:
    """Lets go of the arrays that the frames of `error` keep; call it before memory is asked for again."""
    for link in _chain(error):
        if link.__traceback__ is not None:
            traceback.clear_frames(link.__traceback__)
            link.__traceback__ = None


def release() -> None:
    """Gives back memory that nobody uses: cycles of dead objects, PyTorch's caches, the heap's free end."""
    gc.collect()
    if "torch" in sys.modules:
        from memfit.adapters.torch.oom import release as release_torch

        release_torch()
    elif sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left and len(seen) < _MAX_CHAIN:
        link = left.pop(0)
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        left.append(link.__cause__)
        if not link.__suppress_context__:
            left.append(link.__context__)


def _recognise_one(error: BaseException) -> OutOfMemory | None:
    text = str(error)
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, MemoryError):
        size: Any = getattr(error, "_total_size", None)
        source = "numpy" if type(error).__module__.startswith("numpy") else "python"
        return _failure(Where.HOST, source, text, size if isinstance(size, int) else None)
    if "ResourceExhaustedError" in names and _MEMORY.search(text):
        return _failure(_where(text), "tensorflow", text)
    if "OpError" in names and _DEVICE_TEXTS.search(text):
        return _failure(Where.DEVICE, "tensorflow", text)
    if names & {"JaxRuntimeError", "XlaRuntimeError", "ValueError"} and _STATUS in text and _MEMORY.search(text):
        return _failure(_where(text), "xla", text)
    if names & {"JaxRuntimeError", "XlaRuntimeError"} and _DISPATCH.search(text):
        return _failure(_where(text), "xla", text)
    if type(error).__module__.startswith("google.protobuf") and _ARENA in text:
        return _failure(Where.HOST, "protobuf", text)
    return None


def _where(text: str) -> Where:
    """Whose memory it was: devices are named, and the host is not in XLA's messages."""
    return Where.DEVICE if re.search(r"\b(?:GPU|TPU|CUDA|HBM|device memory)\b", text, re.IGNORECASE) else Where.HOST


def _failure(where: Where, source: str, text: str, requested_bytes: int | None = None) -> OutOfMemory:
    first_line = next((line.strip() for line in text.splitlines() if _MEMORY.search(line)), "")
    first_line = first_line or next((line.strip() for line in text.splitlines() if line.strip()), "")
    return OutOfMemory(where, source, requested_bytes or _requested(text), None, first_line)


def _requested(text: str) -> int | None:
    found = _BYTES.search(text)
    if found is not None:
        unit = found[2].lower()
        return int(found[1]) if unit == "bytes" and found[1].isdigit() else int(float(found[1]) * _FACTORS[unit[0]])
    shape = _SHAPE.search(text)
    if shape is None:
        return None
    return math.prod(int(size) for size in shape[1].split(",") if size) * _ITEM_BYTES.get(shape[2], 1)

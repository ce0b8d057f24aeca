"""Recognises out-of-memory errors: one table of exception types and messages, used everywhere.

There is no single exception. PyTorch's caching allocators raise `torch.OutOfMemoryError`, its CPU allocator and all
libraries below it a `RuntimeError` that only its text tells apart. TensorFlow raises `ResourceExhaustedError`, which it
also uses for other limits, JAX `JaxRuntimeError` from a compiled function and `ValueError` from a single operation,
numpy and Python a `MemoryError`, the operating system an `OSError`. Types are known by their names and modules, so that
no framework is imported here, and come first; text counts only in types that such failures come as, so that an error
that merely talks about memory stays what it is.

Some failures can't be told apart by anything that they say. cuBLAS and cuDNN report ALLOC_FAILED or NOT_INITIALIZED
when their first handle finds no memory, but also when the installed versions don't match; a thread that can't be
started may have met a limit on their number; a worker of a data loader may have been killed by a person. They count as
running out of memory, which they nearly always are: who retries has to bound the number of tries and then show the
original message. Requests for an exabyte or more are never counted: no memory ever holds them, and what asked for them
read a size from damaged data, as a collective that has lost its peers does.
"""

import builtins
import errno
import math
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from memfit.core.errors import MemfitError
from memfit.core.guarding import MemoryFailure, Where

_IMPOSSIBLE_BYTES = 2**60
# Deeper chains of causes are loops or noise.
_MAX_CHAIN = 20

_UNIT = r"(\d+(?:\.\d*)?)\s*(bytes|[KMGTPE]i?B|B)\b"
_REQUESTED = re.compile(rf"\b(?:allocat(?:e|ing)|calloc|malloc)(?: async| request for)? {_UNIT}", re.IGNORECASE)
_FREE = re.compile(rf"{_UNIT} (?:is )?free\b", re.IGNORECASE)
_TOTAL = re.compile(rf"\btotal capacity of {_UNIT}|{_UNIT} total\b", re.IGNORECASE)
_MPS = re.compile(rf"MPS allocated: {_UNIT}, other allocations: {_UNIT}, max allowed: {_UNIT}", re.IGNORECASE)
_SHAPE = re.compile(r"tensor with shape ?\[([\d,]*)\] and type (\w+)")
_ITEM_BYTES = {"double": 8, "int64": 8, "float": 4, "int32": 4, "uint32": 4, "half": 2, "bfloat16": 2, "int16": 2}
# PyTorch and numpy divide by powers of 1024 also where they write MB.
_FACTORS = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50, "e": 2**60}


class NamedSizes(NamedTuple):
    """Bytes that a message names; None for what it doesn't."""

    requested: int | None = None
    free: int | None = None
    total: int | None = None


def read_sizes(text: str) -> NamedSizes:
    """Sizes as most messages write them.

    >>> read_sizes("Tried to allocate 2.00 MiB (GPU 0; 1.00 GiB total capacity; 1.50 KiB free)")
    NamedSizes(requested=2097152, free=1536, total=1073741824)
    """
    return NamedSizes(*(_size(pattern.search(text)) for pattern in (_REQUESTED, _FREE, _TOTAL)))


def _read_mps_sizes(text: str) -> NamedSizes:
    """Sizes in a message of Apple's MPS backend: requested, free and total bytes."""
    used = _MPS.search(text)
    if used is None:
        return read_sizes(text)
    ours, others, allowed = (_bytes(used[index], used[index + 1]) for index in (1, 3, 5))
    return NamedSizes(read_sizes(text).requested, max(0, allowed - ours - others), allowed)


def _read_tensor_size(text: str) -> NamedSizes:
    """Requested bytes in a message of TensorFlow, which gives a tensor's shape or a number of bytes."""
    shape = _SHAPE.search(text)
    if shape is None:
        return read_sizes(text)
    return NamedSizes(math.prod(int(size) for size in shape[1].split(",") if size) * _ITEM_BYTES.get(shape[2], 1))


def _size(match: re.Match[str] | None) -> int | None:
    if match is None:
        return None
    number, unit = (group for group in match.groups() if group is not None)
    return _bytes(number, unit)


def _bytes(number: str, unit: str) -> int:
    # Whole numbers of bytes may have more digits than a float holds.
    is_whole = unit.lower() == "bytes" and number.isdigit()
    return int(number) if is_whole else int(float(number) * _FACTORS[unit[0].lower()])


# Exceptions whose text counts: what libraries in C and C++ raise.
_BY_TEXT = ("RuntimeError", "ImportError", "SystemError", "tensorflow.OpError")


class ErrorSign(NamedTuple):
    """One way to report that memory ran out."""

    source: str  # who reports it, as in `MemoryFailure`
    where: Where | None  # whose memory; None: the device's where the text names one, otherwise the host's
    text: re.Pattern[str]  # found in the message
    types: tuple[str, ...]
    """Exception classes, subclasses included: "torch.OutOfMemoryError" by package name, "MemoryError" for Python's."""
    sizes: Callable[[str], NamedSizes]  # reads the bytes that the message names


_HOST, _DEVICE = Where.HOST, Where.DEVICE
_MEMORY = r"\bOOM\b|out of memory|\ballocat|\bmemory\b"
_XLA = ("RuntimeError", "ValueError")


def _entry(
    source: str,
    where: Where | None,
    text: str = "",
    types: tuple[str, ...] = _BY_TEXT,
    sizes: Callable[[str], NamedSizes] = read_sizes,
) -> ErrorSign:
    return ErrorSign(source, where, re.compile(text, re.IGNORECASE | re.MULTILINE), types, sizes)


TABLE: tuple[ErrorSign, ...] = (
    # By type.
    _entry("torch", _DEVICE, r"MPS backend out of memory", ("torch.OutOfMemoryError", *_BY_TEXT), _read_mps_sizes),
    _entry("cuda", _DEVICE, r"\bCUDA\b", ("torch.OutOfMemoryError",)),
    _entry("torch", _DEVICE, types=("torch.OutOfMemoryError",)),
    _entry("cuda", _DEVICE, types=("cupy.OutOfMemoryError",)),
    _entry("ray", _HOST, types=("ray.OutOfMemoryError",)),
    _entry("numpy", _HOST, types=("numpy.MemoryError", "numpy._ArrayMemoryError")),
    _entry("numpy", _HOST, r"Unable to allocate [^\n]*\barray with shape", ("MemoryError", *_BY_TEXT)),
    _entry("python", _HOST, types=("MemoryError",)),
    _entry("tensorflow", None, _MEMORY, ("tensorflow.ResourceExhaustedError",), _read_tensor_size),
    _entry("protobuf", _HOST, r"Arena alloc failed", ("google.DecodeError",)),
    # By text. PyTorch's CPU allocator:
    _entry("torch", _HOST, r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|^C10 Out of Memory"),
    _entry("torch", _HOST, r"\[enforce fail at (?:\S*[/\\])?(?:alloc_cpu|CPUAllocator)\.cpp"),
    _entry("torch", _HOST, r"posix_memalign failed|Could not allocate memory (?:for|to change) Tensor"),
    # Libraries of devices.
    _entry("nccl", _DEVICE, r"NCCL[\s\S]*?(?:Cuda failure \d* ?'out of memory'|Failed to CUDA calloc)"),
    _entry("nccl", _DEVICE, r"Failed to CUDA (?:calloc|malloc)"),
    _entry("shared memory", _HOST, r"NCCL[\s\S]*?(?:/dev/shm/nccl|shared memory segment)[\s\S]*?(?:No space|allocate)"),
    _entry("cublas", _DEVICE, r"\bCUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)|HIPBLAS_STATUS_ALLOC_FAILED"),
    _entry("cublas", _DEVICE, r"\b(?:CUSOLVER|CUSPARSE|HIPSPARSE|HIPSOLVER)_STATUS_ALLOC_FAILED"),
    _entry("cudnn", _DEVICE, r"\bCUDNN_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED|\w*_ALLOCATION_FAILED)"),
    # No algorithm for a convolution is found when none of their workspaces can be had.
    _entry("cudnn", _DEVICE, r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    _entry("cudnn", _DEVICE, r"unable to find (?:a valid cuDNN algorithm|an engine to execute this computation)"),
    _entry("cudnn", _DEVICE, r"\bmiopenStatusAllocFailed|\bCUFFT_ALLOC_FAILED"),
    # The allocator asks NVML for the use of the device only to write the message of an OutOfMemoryError.
    _entry("cuda", _DEVICE, r"NVML_SUCCESS == [\s\S]*?INTERNAL ASSERT FAILED at [^\n]*CUDACachingAllocator"),
    # Workers, threads and what they share.
    _entry("shared memory", _HOST, r"unable to allocate shared memory ?\(shm\)|workers are out of shared memory"),
    _entry("shared memory", _HOST, r"unable to write to file </torch_[^\n]*No space left on device"),
    # SIGKILL is what the kernel sends; user-space daemons such as earlyoom begin with SIGTERM.
    _entry("worker", _HOST, r"DataLoader worker (?:\(pid[^)\n]*\) )?is killed by signal: (?:Killed|Terminated|Bus)"),
    _entry("threads", _HOST, r"can't start new thread|^(?:\w+: )*(?:thread\S* )*Resource temporarily unavailable\W*$"),
    _entry("tensorflow", None, r"\bOOM when allocating tensor", sizes=_read_tensor_size),
    # XLA: its allocators on devices say "while trying to allocate", that of JAX on the host doesn't. TensorFlow's does.
    _entry("xla", _DEVICE, r"RESOURCE[_ ]EXHAUSTED[\s\S]*?while trying to allocate", _XLA),
    _entry("xla", None, rf"RESOURCE[_ ]EXHAUSTED[\s\S]*?(?:{_MEMORY})", _XLA),
    _entry("xla", None, r"\bout of memory allocating \d+ bytes"),
    _entry(
        "tensorflow", _DEVICE, r"Dst tensor is not initialized|Failed to allocate request for", sizes=_read_tensor_size
    ),
    _entry("tensorflow", _DEVICE, r"failed to allocate \S+ ?\S* on device|\bCUDA_OUT_OF_MEMORY\b"),
    # oneDNN, MKL, the C++ runtime, the dynamic loader, the system.
    _entry("torch", _HOST, r"could not create a memory(?: object)?\W*$|could not (?:create|execute) a primitive\W*$"),
    _entry("torch", _HOST, r"\bOUT_OF_HOST_MEMORY\b|^[^\n]*\bERROR: Not enough memory"),
    _entry("python", _HOST, r"\bstd::bad_alloc\b|paging file is too small"),
    _entry("system", _HOST, r"\bCannot allocate memory\b"),
    _entry("system", _HOST, r"failed to map segment from shared object|cannot map zero-fill pages"),
    # Devices.
    _entry("cuda", _DEVICE, r"\bCUDA\b[^\n]*\bout of memory\b"),
    _entry("cuda", _DEVICE, r"\b(?:CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory)\b"),
    _entry("torch", _DEVICE, r"\b(?:UR|PI|ZE)_\w*_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)\b"),
    # Any other accelerator's, but not advice about what to do against it.
    _entry(
        "torch",
        _DEVICE,
        r"(?<!run )(?<!runs )(?<!running )(?<!avoid )(?<!prevent )(?<!an )(?<!cause )\bout of memory\b"
        r"(?! (?:errors?|issues?|problems?)\b)",
    ),
)
"""The first entry that matches counts."""

# These begin like advice or a limit of something else, whatever else they mention.
IMPOSTORS = re.compile(
    r"more than 1 ?EB|out of resources?: shared memory|too many resources requested for launch|"
    r"Received message larger than max|Too many open files",
    re.IGNORECASE,
)
_NAMED_DEVICE = re.compile(r"\b(?:GPU|TPU|CUDA|HBM|VMEM|device memory)\b", re.IGNORECASE)
_CAUGHT = re.compile(r"^Caught (\w+) in ", re.MULTILINE)
_LAST_LINE = re.compile(r"^([A-Za-z_][\w.]*)(?:: ([\s\S]*))?\Z", re.MULTILINE)


def recognise(error: BaseException) -> MemoryFailure | None:
    """What ran out, if `error` or one that led to it is a failure to get memory; None for everything else.

    >>> recognise(MemoryError()).source
    'python'
    >>> recognise(ValueError("please avoid running out of memory")) is None
    True
    """
    # What ends the program ends it.
    if not isinstance(error, Exception):
        return None
    for link in _chain(error):
        # memfit's own errors have decided already that nothing is left to try.
        if isinstance(link, MemfitError):
            return None
        failure = _recognise_one(link)
        if failure is not None:
            return failure
    return None


def caught(action: Callable[[], object]) -> MemoryFailure | None:
    """What ran out in an action, whose frames no longer hold anything then; any other exception goes on."""
    try:
        action()
    except Exception as error:
        failure = recognise(error)
        if failure is None:
            raise
        clear_frames(error)
        return failure
    return None


def clear_frames(error: BaseException) -> None:
    """Lets go of the tensors that `error` keeps, by its tracebacks and the variables of functions that it ended."""
    for link in _chain(error):
        if link.__traceback__ is not None:
            traceback.clear_frames(link.__traceback__)
            link.__traceback__ = None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and what was being handled when it was raised."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left and len(seen) < _MAX_CHAIN:
        link = left.pop(0)
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if isinstance(link, BaseExceptionGroup):
            left.extend(link.exceptions)
        left.append(link.__cause__)
        if not link.__suppress_context__:
            left.append(link.__context__)


def _recognise_one(error: BaseException) -> MemoryFailure | None:
    text, types = str(error), {_name(kind) for kind in type(error).__mro__}
    if type(error).__name__ == "AcceleratorError" and getattr(error, "error_code", None) == 2:
        # PyTorch's; it carries the number of the CUDA error, and 2 is cudaErrorMemoryAllocation.
        types.add("torch.OutOfMemoryError")
        text = f"CUDA error 2: {text}"
    if isinstance(error, OSError):
        # 8 and 1455: ERROR_NOT_ENOUGH_MEMORY and ERROR_COMMITMENT_LIMIT of Windows.
        if error.errno == errno.ENOMEM or getattr(error, "winerror", None) in (8, 1455):
            types.add("MemoryError")
        elif error.errno == errno.ENOSPC and str(error.filename or "").startswith("/dev/shm"):
            return MemoryFailure(_HOST, "shared memory", text=text)
        elif error.errno is None:
            # It comes from a library.
            types.add("RuntimeError")
    caught = _CAUGHT.search(text)
    if caught is not None and "Traceback (most recent call last)" in text:
        text, types = _of_other_process(caught[1], text)
    failure = _look_up(text, types)
    # NumPy's exception has the number itself.
    size: Any = getattr(error, "_total_size", None)
    return replace(failure, requested_bytes=size) if failure is not None and isinstance(size, int) else failure


def _name(kind: type) -> str:
    package = kind.__module__.partition(".")[0]
    return kind.__name__ if package == "builtins" else f"{package}.{kind.__name__}"


def _of_other_process(name: str, text: str) -> tuple[str, set[str]]:
    """Message and types of an exception of a worker or replica, raised again with its whole traceback as text."""
    report = text.rstrip().rpartition("Traceback (most recent call last)")[2]
    # Lines of the traceback are indented; what follows is the name of the type and the message.
    last = _LAST_LINE.search(re.sub(r"\A.*\n", "", report))
    types = {_name(base) for base in getattr(builtins, name, RuntimeError).__mro__}
    if not hasattr(builtins, name):
        types |= {known for entry in TABLE for known in entry.types if known.rpartition(".")[2] == name}
    return (last[2] or "") if last is not None else "", types


def _look_up(text: str, types: set[str]) -> MemoryFailure | None:
    if IMPOSTORS.search(text):
        return None
    for entry in TABLE:
        match = entry.text.search(text) if types.intersection(entry.types) else None
        if match is None:
            continue
        sizes = entry.sizes(text)
        if (sizes.requested or 0) >= _IMPOSSIBLE_BYTES:
            return None
        where = entry.where or (_DEVICE if _NAMED_DEVICE.search(text) else _HOST)
        # The line in which the match ends; the first, where the type alone has said it.
        line = text[text.rfind("\n", 0, match.end()) + 1 :] if match[0] else text.lstrip()
        return MemoryFailure(where, entry.source, *sizes, line.partition("\n")[0].strip())
    return None

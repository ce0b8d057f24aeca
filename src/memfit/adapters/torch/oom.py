"""What running out of memory looks like in a PyTorch program: the one place that knows.

There is no single exception. The caching allocators raise `torch.OutOfMemoryError`, the CPU allocator and all libraries
below PyTorch a `RuntimeError` that only its text tells apart, numpy and Python a `MemoryError`, the operating system an
`OSError`. Types are asked first; text counts only in types that such failures come as, so that an error that merely
talks about memory stays what it is.

Some failures can't be told apart by anything that they say. cuBLAS and cuDNN report ALLOC_FAILED or NOT_INITIALIZED
when their first handle finds no memory, but also when the installed versions don't match; a thread that can't be
started may have met a limit on their number; a worker of a data loader may have been killed by a person. They count as
running out of memory, which they nearly always are: who retries has to bound the number of tries and then show the
original message. Requests for an exabyte or more are never counted: no memory ever holds them, and what asked for them
read a size from damaged data, as a collective that has lost its peers does.
"""

import contextlib
import ctypes
import errno
import functools
import gc
import re
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from memfit.core.errors import MemfitError
from memfit.core.guarding import OutOfMemory, Where

_IMPOSSIBLE_BYTES = 2**60
# From malloc.h of the GNU C library.
_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1 << 20
# Deeper chains of causes are loops or noise.
_MAX_CHAIN = 20

# Source, whose memory, and the text; the first that is found counts.
_TEXTS: tuple[tuple[str, Where, re.Pattern[str]], ...] = tuple(
    (source, where, re.compile(text, re.IGNORECASE | re.MULTILINE))
    for source, where, text in (
        ("torch", Where.HOST, r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|^C10 Out of Memory"),
        ("torch", Where.HOST, r"\[enforce fail at (?:\S*[/\\])?(?:alloc_cpu|CPUAllocator)\.cpp"),
        ("torch", Where.HOST, r"posix_memalign failed|Could not allocate memory (?:for|to change) Tensor"),
        ("nccl", Where.DEVICE, r"NCCL[\s\S]*(?:Cuda failure \d* ?'out of memory'|Failed to CUDA calloc)"),
        ("nccl", Where.DEVICE, r"Failed to CUDA (?:calloc|malloc)"),
        (
            "shared memory",
            Where.HOST,
            r"NCCL[\s\S]*(?:/dev/shm/nccl|shared memory segment)[\s\S]*(?:No space|allocate)",
        ),
        ("cublas", Where.DEVICE, r"\bCUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)|HIPBLAS_STATUS_ALLOC_FAILED"),
        ("cublas", Where.DEVICE, r"\b(?:CUSOLVER|CUSPARSE|HIPSPARSE|HIPSOLVER)_STATUS_ALLOC_FAILED"),
        ("cudnn", Where.DEVICE, r"\bCUDNN_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED|\w*_ALLOCATION_FAILED)"),
        # No algorithm for a convolution is found when none of their workspaces can be had.
        ("cudnn", Where.DEVICE, r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
        ("cudnn", Where.DEVICE, r"unable to find (?:a valid cuDNN algorithm|an engine to execute this computation)"),
        ("cudnn", Where.DEVICE, r"\bmiopenStatusAllocFailed|\bCUFFT_ALLOC_FAILED"),
        # The allocator asks NVML for the use of the device only to write the message of an OutOfMemoryError.
        ("cuda", Where.DEVICE, r"NVML_SUCCESS == [\s\S]*INTERNAL ASSERT FAILED at [^\n]*CUDACachingAllocator"),
        ("shared memory", Where.HOST, r"unable to allocate shared memory ?\(shm\)|workers are out of shared memory"),
        ("shared memory", Where.HOST, r"unable to write to file </torch_[^\n]*No space left on device"),
        # SIGKILL is what the kernel sends; user-space daemons such as earlyoom begin with SIGTERM.
        ("worker", Where.HOST, r"DataLoader worker (?:\(pid[^)\n]*\) )?is killed by signal: (?:Killed|Terminated|Bus)"),
        (
            "threads",
            Where.HOST,
            r"can't start new thread|^(?:\w+: )*(?:thread\S* )*Resource temporarily unavailable\W*$",
        ),
        ("python", Where.HOST, r"\bstd::bad_alloc\b|paging file is too small"),
        ("xla", Where.DEVICE, r"RESOURCE_EXHAUSTED[\s\S]*(?:out of memory|\bOOM\b|\ballocat)"),
        (
            "torch",
            Where.HOST,
            r"could not create a memory(?: object)?\W*$|could not (?:create|execute) a primitive\W*$",
        ),
        ("torch", Where.HOST, r"\bCannot allocate memory\b"),
        # A library that there is no room to load.
        ("torch", Where.HOST, r"failed to map segment from shared object|cannot map zero-fill pages"),
        ("torch", Where.HOST, r"\bOUT_OF_HOST_MEMORY\b|^[^\n]*\bERROR: Not enough memory"),
        ("cuda", Where.DEVICE, r"\bCUDA\b[^\n]*\bout of memory\b"),
        ("cuda", Where.DEVICE, r"\b(?:CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory)\b"),
        ("torch", Where.DEVICE, r"\b(?:UR|PI|ZE)_\w*_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)\b"),
        # Any other accelerator's, but not advice about what to do against it.
        (
            "torch",
            Where.DEVICE,
            r"(?<!run )(?<!runs )(?<!running )(?<!avoid )(?<!prevent )(?<!an )(?<!cause )\bout of memory\b"
            r"(?! (?:errors?|issues?|problems?)\b)",
        ),
    )
)
# These begin like advice or a limit of something else, whatever else they mention.
_IMPOSTORS = re.compile(
    r"more than 1 ?EB|out of resources?: shared memory|too many resources requested for launch|"
    r"Received message larger than max|Too many open files",
    re.IGNORECASE,
)
_CAUGHT = re.compile(r"^Caught (\w+) in ", re.MULTILINE)
_LAST_LINE = re.compile(r"^([A-Za-z_][\w.]*)(?:: ([\s\S]*))?\Z", re.MULTILINE)

_UNIT = r"(\d+(?:\.\d*)?)\s*(bytes|[KMGTPE]i?B|B)\b"
_REQUESTED = re.compile(r"\b(?:allocate|allocating|calloc|malloc)(?: async)? " + _UNIT, re.IGNORECASE)
_FREE = re.compile(_UNIT + r" (?:is )?free\b", re.IGNORECASE)
_MPS = re.compile(
    rf"MPS allocated: {_UNIT}, other allocations: {_UNIT}, max allowed: {_UNIT}",
    re.IGNORECASE,
)
# PyTorch and numpy divide by powers of 1024 also where they write MB.
_FACTORS = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50, "e": 2**60}


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
        if isinstance(link, MemfitError):
            return None
        failure = _recognise_one(link)
        if failure is not None:
            return failure
    return None


def clear_frames(error: BaseException) -> None:
    """Lets go of the tensors that `error` keeps: its tracebacks, and the variables of functions that it ended.

    Call it before memory is asked for again. Functions that still run keep their variables.
    """
    for link in _chain(error):
        if link.__traceback__ is not None:
            traceback.clear_frames(link.__traceback__)
            link.__traceback__ = None


def release() -> None:
    """Gives back all memory that nobody uses: cycles of dead objects, caches of the allocators, the heap's free end."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        # Page-locked host memory has a cache of its own, which only newer releases can empty.
        empty_host_cache = getattr(torch._C, "_host_emptyCache", None)
        if empty_host_cache is not None:
            empty_host_cache()
    if hasattr(torch, "xpu") and torch.xpu.is_available() and torch.xpu.is_initialized():
        torch.xpu.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


def return_large_blocks() -> None:
    """From now on, freed blocks of the C library go back to the system at once, where they are large.

    By default it keeps blocks of up to 32 MiB in a heap, once one of that size was freed, and what lies between two
    that are in use is lost to larger ones. The system's pages take longer, so this is for programs that run out.
    """
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def where_of(model: torch.nn.Module) -> Where:
    """Whose memory the passes of `model` take: the device's, if any of its tensors is on one."""
    tensors = [*model.parameters(), *model.buffers()]
    return Where.HOST if all(tensor.device.type == "cpu" for tensor in tensors) else Where.DEVICE


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


def _recognise_one(error: BaseException) -> OutOfMemory | None:
    text = str(error)
    if _IMPOSTORS.search(text):
        return None
    failure = _by_type(error, text) or _by_text(error, text)
    if failure is None or (failure.requested_bytes or 0) >= _IMPOSSIBLE_BYTES:
        return None
    return failure


def _by_type(error: BaseException, text: str) -> OutOfMemory | None:
    if isinstance(error, torch.OutOfMemoryError):
        return _failure(Where.DEVICE, _source(text, "cuda" if "CUDA" in text else "torch"), text)
    if isinstance(error, MemoryError):
        size: Any = getattr(error, "_total_size", None)
        source = "numpy" if type(error).__module__.startswith("numpy") else "python"
        return _failure(Where.HOST, source, text, size if isinstance(size, int) else None)
    if isinstance(error, OSError):
        return _by_error_number(error, text)
    # torch.AcceleratorError carries the number of the CUDA error: 2 is cudaErrorMemoryAllocation.
    if type(error).__name__ == "AcceleratorError" and getattr(error, "error_code", None) == 2:
        return _failure(Where.DEVICE, "cuda", text)
    return None


def _by_error_number(error: OSError, text: str) -> OutOfMemory | None:
    # 8 and 1455: ERROR_NOT_ENOUGH_MEMORY and ERROR_COMMITMENT_LIMIT of Windows.
    if error.errno == errno.ENOMEM or getattr(error, "winerror", None) in (8, 1455):
        return _failure(Where.HOST, "python", text)
    if error.errno == errno.ENOSPC and str(error.filename or "").startswith("/dev/shm"):
        return _failure(Where.HOST, "shared memory", text)
    return None


def _by_text(error: BaseException, text: str) -> OutOfMemory | None:
    if isinstance(error, RuntimeError | ImportError | SystemError):
        return _in_text(text)
    # Errors of XLA come as ValueError where an operation runs by itself; OSError without a number as from a library.
    is_other = isinstance(error, ValueError) and "RESOURCE_EXHAUSTED" in text
    return _in_text(text) if is_other or (isinstance(error, OSError) and error.errno is None) else None


def _in_text(text: str) -> OutOfMemory | None:
    caught = _CAUGHT.search(text)
    if caught is not None and "Traceback (most recent call last)" in text:
        return _of_other_process(caught[1], text)
    for source, where, pattern in _TEXTS:
        found = pattern.search(text)
        if found is not None:
            return _failure(where, source, text)
    return None


def _of_other_process(name: str, text: str) -> OutOfMemory | None:
    """An exception of a worker or replica: it is raised again with its whole traceback as text."""
    report = text.rstrip().rpartition("Traceback (most recent call last)")[2]
    # Lines of the traceback are indented; what follows is the name of the type and the message.
    last = _LAST_LINE.search(re.sub(r"\A.*\n", "", report))
    message = (last[2] or "") if last is not None else ""
    if _IMPOSTORS.search(message):
        return None
    if name in ("MemoryError", "_ArrayMemoryError"):
        source = "numpy" if name.startswith("_Array") or "for an array" in message else "python"
        return _failure(Where.HOST, source, message or name)
    if name == "OutOfMemoryError":
        return _failure(Where.DEVICE, _source(message, "cuda"), message)
    return _in_text(message) if name.endswith("Error") and name not in ("ValueError", "KeyError") else None


def _source(text: str, default: str) -> str:
    return next((source for source, _, pattern in _TEXTS[:-1] if pattern.search(text)), default)


def _failure(where: Where, source: str, text: str, requested_bytes: int | None = None) -> OutOfMemory:
    requested = _REQUESTED.search(text)
    if requested_bytes is None and requested is not None:
        requested_bytes = _size(requested[1], requested[2])
    first_line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return OutOfMemory(where, source, requested_bytes, _free_bytes(text), first_line)


def _free_bytes(text: str) -> int | None:
    free = _FREE.search(text)
    if free is not None:
        return _size(free[1], free[2])
    mps = _MPS.search(text)
    if mps is None:
        return None
    ours, others, allowed = (_size(mps[index], mps[index + 1]) for index in (1, 3, 5))
    return max(0, allowed - ours - others)


def _size(number: str, unit: str) -> int:
    # Whole numbers of bytes may have more digits than a float holds.
    return (
        int(number) if unit.lower() == "bytes" and number.isdigit() else int(float(number) * _FACTORS[unit[0].lower()])
    )


@functools.cache
def _malloc_trim() -> Any:
    """The function of the GNU C library that gives free memory back to the system; None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None

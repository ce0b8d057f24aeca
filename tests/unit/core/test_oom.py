import errno
import gc
import json
import subprocess
import sys
import traceback
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._utils import ExceptionWrapper

from memfit.core import oom
from memfit.core.guarding import BrokenUpdate, CannotFit, Where

MIB, GIB = 2**20, 2**30

# Text, where, source, bytes that were asked for, bytes that were free.
CUDA_OLD = (
    "CUDA out of memory. Tried to allocate 256.00 MiB (GPU 0; 79.20 GiB total capacity; 76.06 GiB already allocated; "
    "201.31 MiB free; 77.51 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting "
    "max_split_size_mb to avoid fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
CUDA_OLDER = (
    "CUDA out of memory. Tried to allocate 381.50 MiB (GPU 1; 7.92 GiB total capacity; 7.16 GiB already allocated; "
    "231.00 MiB free; 452.50 KiB cached)"
)
HIP = (
    "HIP out of memory. Tried to allocate 2.00 MiB. GPU 7 has a total capacity of 287.98 GiB of which 203.49 GiB is "
    "free. Of the allocated memory 68.63 GiB is allocated by PyTorch, and 14.93 GiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
XPU = (
    "XPU out of memory. Tried to allocate 4.66 GiB. GPU 0 has a total capacity of 5.65 GiB of which 5.65 GiB is free. "
    "Of the allocated memory 195.50 KiB is allocated by PyTorch, and 1.81 MiB is reserved by PyTorch but unallocated. "
    "Please use `empty_cache` to release all unoccupied cached memory."
)
MPS = (
    "MPS backend out of memory (MPS allocated: 5.50 GB, other allocations: 14.75 GB, max allowed: 20.50 GB). Tried to "
    "allocate 147.00 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory "
    "allocations (may cause system failure)."
)
NCCL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.19.3\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\nCuda failure 2 'out of memory'"
)
NCCL_CALLOC = (
    "[3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n"
    "[3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes"
)
NVML = (
    'NVML_SUCCESS == {} INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":{}, please report a bug to '
    "PyTorch."
)
BUS = (
    "DataLoader worker (pid 3855) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit."
)
CPU = "[enforce fail at {}] {}. DefaultCPUAllocator: {}: you tried to allocate {} bytes."
DEVICE, HOST = Where.DEVICE, Where.HOST
OUT = [
    (CUDA_OLD, DEVICE, "cuda", 256 * MIB, int(201.31 * MIB)),
    (CUDA_OLDER + "\nat iteration 19", DEVICE, "cuda", int(381.5 * MIB), 231 * MIB),
    (HIP, DEVICE, "torch", 2 * MIB, int(203.49 * GIB)),
    (XPU, DEVICE, "torch", int(4.66 * GIB), int(5.65 * GIB)),
    (MPS, DEVICE, "torch", 147 * MIB, GIB // 4),
    ("NPU out of memory. Tried to allocate 20.00 MiB (NPU 0; 29.50 GiB total)", DEVICE, "torch", 20 * MIB, None),
    ("cuda runtime error (2) : out of memory at /opt/THC/generic/THCStorage.cu:58", DEVICE, "cuda", None, None),
    ("CUDA error: out of memory\nCUDA kernel errors might be reported later", DEVICE, "cuda", None, None),
    ("CUDA driver error: out of memory", DEVICE, "cuda", None, None),
    ("Triton Error [CUDA]: out of memory", DEVICE, "cuda", None, None),
    ("TensorStorage tensor.h 168\ncuda failed with error 2 out of memory. use CUDA_LAUNCH", DEVICE, "cuda", None, None),
    ("HIP error: out of memory", DEVICE, "torch", None, None),
    (NVML.format("r", 830), DEVICE, "cuda", None, None),
    (NVML.format("DriverAPI::get()->nvmlInit_v2_()", 813), DEVICE, "cuda", None, None),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", DEVICE, "cublas", None, None),
    ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", DEVICE, "cublas", None, None),
    ("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`", DEVICE, "cublas", None, None),
    ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", DEVICE, "cudnn", None, None),
    ("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", DEVICE, "cudnn", None, None),
    ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", DEVICE, "cudnn", None, None),
    ("Unable to find a valid cuDNN algorithm to run convolution", DEVICE, "cudnn", None, None),
    ("GET was unable to find an engine to execute this computation", DEVICE, "cudnn", None, None),
    ("cuFFT error: CUFFT_ALLOC_FAILED", DEVICE, "cudnn", None, None),
    (NCCL, DEVICE, "nccl", None, None),
    (NCCL_CALLOC, DEVICE, "nccl", 6291456, None),
    ("level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)", DEVICE, "torch", None, None),
    (CPU.format("CPUAllocator.cpp:71", "", "can't allocate memory", 64597662208), HOST, "torch", 64597662208, None),
    (CPU.format("alloc_cpu.cpp:75", "err == 0", "can't allocate memory", 4096), HOST, "torch", 4096, None),
    (CPU.format(r"..\c10\core\impl\alloc_cpu.cpp:72", "data", "not enough memory", 7), HOST, "torch", 7, None),
    ("could not create a memory object", HOST, "torch", None, None),
    ("could not create a primitive", HOST, "torch", None, None),
    ("MKL FFT error: Intel oneMKL DFTI ERROR: Not enough memory to allocate", HOST, "torch", None, None),
    ("std::bad_alloc", HOST, "python", None, None),
    ("can't start new thread", HOST, "threads", None, None),
    ("Resource temporarily unavailable", HOST, "threads", None, None),
    ("unable to mmap 512 bytes from file <a.pt>: Cannot allocate memory (12)", HOST, "system", None, None),
    ("unable to allocate shared memory(shm) for file </torch_1_2_3>: No space", HOST, "shared memory", None, None),
    ("unable to write to file </torch_1_2>: No space left on device (28)", HOST, "shared memory", None, None),
    (BUS, HOST, "shared memory", None, None),
    ("DataLoader worker (pid 8102) is killed by signal: Killed. ", HOST, "worker", None, None),
    ("DataLoader worker is killed by signal: Killed.", HOST, "worker", None, None),
    ("DataLoader worker (pid 8102) is killed by signal: Terminated. ", HOST, "worker", None, None),
    (
        "Bad StatusOr access: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space "
        "vmem.",
        DEVICE,
        "xla",
        None,
        None,
    ),
    ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4770354232 bytes.", DEVICE, "xla", 4770354232, None),
    ("RESOURCE_EXHAUSTED: Out of memory allocating 800000000 bytes.", HOST, "xla", 800000000, None),
    ("INTERNAL: Error dispatching computation: Out of memory allocating 3 bytes.", HOST, "xla", 3, None),
]

IMPOSTORS = [
    # A collective that has lost its peers reads a size from what it never got.
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than 1EB memory."),
    RuntimeError("CUDA out of memory. Tried to allocate more than 1EB memory."),
    RuntimeError(CPU.format("alloc_cpu.cpp:127", "err == 0", "can't allocate memory", 2**62)),
    RuntimeError("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"),
    RuntimeError("NCCL error: remote process exited or there was a network error. Connection closed by remote peer"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: too many resources requested for launch"),
    RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes"),
    RuntimeError("cuDNN error: CUDNN_STATUS_BAD_PARAM"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm(...)`"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)"),
    RuntimeError("could not create a primitive descriptor for the convolution forward propagation primitive."),
    RuntimeError("unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)"),
    RuntimeError("DataLoader worker (pid 5) is killed by signal: Segmentation fault. "),
    RuntimeError("DataLoader worker (pid(s) 3216) exited unexpectedly"),
    RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
    RuntimeError("a smaller batch is needed, or you may run out of memory"),
    RuntimeError("set this option to avoid out of memory errors"),
    RuntimeError("RESOURCE_EXHAUSTED: Received message larger than max (5000000 vs. 4194304)"),
    RuntimeError("view size is not compatible with input tensor's size and stride"),
    ValueError("CUDA out of memory"),
    ValueError("please avoid running out of memory"),
    KeyError("out of memory"),
    OSError(errno.ENOSPC, "No space left on device", "model.pt"),
    OSError(errno.EMFILE, "Too many open files"),
    BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    ImportError("cannot import name 'memory' from 'torch'"),
    KeyboardInterrupt("out of memory"),
    SystemExit("out of memory"),
    CannotFit("out of memory"),
    BrokenUpdate("out of memory"),
]


@pytest.mark.parametrize(("text", "where", "source", "requested", "free"), OUT, ids=[row[0][:40] for row in OUT])
def test_running_out_is_recognised_by_its_text(text, where, source, requested, free):
    failure = oom.recognise(RuntimeError(text))
    assert failure is not None
    assert (failure.where, failure.source) == (where, source)
    assert (failure.requested_bytes, failure.free_bytes) == (requested, free)
    assert failure.text in [line.strip() for line in text.splitlines()]
    # Programs print the type in front, and other programs raise what was printed.
    assert oom.recognise(RuntimeError(f"RuntimeError: {text}")) is not None


@pytest.mark.parametrize("error", IMPOSTORS, ids=lambda error: str(error)[:40])
def test_impostors_are_not_recognised(error):
    assert oom.recognise(error) is None


def raised_by(module, name, *bases):
    """A class of a framework, which need not be installed."""
    return type(name, bases or (Exception,), {"__module__": module})


OpError = raised_by("tensorflow.python.framework.errors_impl", "OpError")
ResourceExhaustedError = raised_by("tensorflow.python.framework.errors_impl", "ResourceExhaustedError", OpError)
JaxRuntimeError = raised_by("jax.errors", "JaxRuntimeError", RuntimeError)
DecodeError = raised_by("google.protobuf.message", "DecodeError")
OF_FRAMEWORKS = [
    (
        ResourceExhaustedError("OOM when allocating tensor with shape[64,100] and type float on /device:GPU:0"),
        ("tensorflow", DEVICE, 25600),
    ),
    (
        ResourceExhaustedError("Out of memory while trying to allocate 1810662340 bytes. [Op:__inference]"),
        ("tensorflow", HOST, 1810662340),
    ),
    (OpError("CUDA_ERROR_OUT_OF_MEMORY: out of memory"), ("cuda", DEVICE, None)),
    (OpError("Dst tensor is not initialized."), ("tensorflow", DEVICE, None)),
    (OpError("Failed to allocate request for 1.5GiB (1610612736B) on device"), ("tensorflow", DEVICE, 3 * GIB // 2)),
    (JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 800 bytes."), ("xla", HOST, 800)),
    (ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."), ("xla", HOST, 8)),
    (DecodeError("Error parsing message with type 'FunctionDef': Arena alloc failed"), ("protobuf", HOST, None)),
    (raised_by("ray.exceptions", "OutOfMemoryError")("Task was killed"), ("ray", HOST, None)),
    (raised_by("cupy.cuda.memory", "OutOfMemoryError", MemoryError)("Out of memory"), ("cuda", DEVICE, None)),
]


@pytest.mark.parametrize(("error", "expected"), OF_FRAMEWORKS, ids=repr)
def test_types_are_known_by_name_and_module(error, expected):
    failure = oom.recognise(error)
    assert (failure.source, failure.where, failure.requested_bytes) == expected


@pytest.mark.parametrize(
    "error",
    [
        ResourceExhaustedError("Too many open files"),
        OpError("Blas GEMM launch failed: shapes differ"),
        DecodeError("Error parsing message: Wire format was corrupt"),
        raised_by("__main__", "OutOfMemoryError")("no tensors in this"),
    ],
    ids=repr,
)
def test_types_alone_do_not_say_it(error):
    assert oom.recognise(error) is None


def test_names_are_those_of_the_frameworks():
    assert oom._name(torch.OutOfMemoryError) == "torch.OutOfMemoryError"
    jax = pytest.importorskip("jax")
    assert issubclass(jax.errors.JaxRuntimeError, RuntimeError)
    message = pytest.importorskip("google.protobuf.message")
    assert oom._name(message.DecodeError) == "google.DecodeError"


def test_sizes_are_read():
    assert oom.recognise(RuntimeError(HIP)).total_bytes == int(287.98 * GIB)
    assert oom.recognise(RuntimeError(CUDA_OLD)).total_bytes == int(79.2 * GIB)
    assert oom.recognise(RuntimeError(MPS)).total_bytes == int(20.5 * GIB)


def test_the_line_that_says_it_is_shown():
    failure = oom.recognise(ResourceExhaustedError("Graph execution error:\n\nin node x\n  OOM when allocating\nHint"))
    assert failure.text == "OOM when allocating"


LOGS = Path(__file__).parents[4] / "shared" / "data" / "oom_logs.jsonl"
SUPPORTED = ("pytorch", "torch_xla", "jax", "tensorflow", "numpy", "theano")


@pytest.mark.skipif(not LOGS.is_file(), reason="the collected texts (../shared/data) are not beside this repository")
def test_texts_that_people_published():
    rows = [json.loads(line) for line in LOGS.read_text(encoding="utf-8").splitlines()]
    # A kill leaves no exception behind.
    rows = [row for row in rows if any(name in row["framework"] for name in SUPPORTED) and "已杀死" not in row["text"]]
    assert len(rows) > 30
    for row in rows:
        failure = oom.recognise(RuntimeError(row["text"]))
        assert failure is not None, row["text"]
        assert failure.where is (HOST if row["device"].startswith(("cpu", "host")) else DEVICE), row["text"]


def test_types_come_before_texts():
    assert oom.recognise(torch.OutOfMemoryError("whatever it says")).where is DEVICE
    assert oom.recognise(torch.OutOfMemoryError(CUDA_OLD)).source == "cuda"
    assert oom.recognise(MemoryError()).source == "python"
    assert oom.recognise(MemoryError("std::bad_alloc")).where is HOST
    assert oom.recognise(OSError(errno.ENOMEM, "Cannot allocate memory")).source == "python"
    assert oom.recognise(OSError(errno.ENOSPC, "No space left", "/dev/shm/torch_1")).source == "shared memory"
    assert oom.recognise(ImportError("libx.so: failed to map segment from shared object")).where is HOST
    assert oom.recognise(ImportError("libx.so.1: cannot map zero-fill pages")).where is HOST
    assert oom.recognise(ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes")).requested_bytes == 12


def test_the_number_of_a_cuda_error():
    class AcceleratorError(RuntimeError):
        error_code = 2

    assert oom.recognise(AcceleratorError("whatever it says")).source == "cuda"
    AcceleratorError.error_code = 700
    assert oom.recognise(AcceleratorError("whatever it says")) is None


def test_what_numpy_raises():
    with pytest.raises(MemoryError) as caught:
        np.empty((2**40, 2**10), dtype=np.float32)
    failure = oom.recognise(caught.value)
    assert failure.source == "numpy"
    assert failure.requested_bytes == 2**52
    old = "Unable to allocate 117. GiB for an array with shape (104812, 5070, 59) and data type int32"
    assert oom.recognise(MemoryError(old)).requested_bytes == 117 * GIB
    older = "Unable to allocate array with shape (1000,1000,1000) and data type float32"
    assert oom.recognise(MemoryError(older)).requested_bytes is None


# Errors behind errors.


def raised(outer, inner, how):
    try:
        try:
            raise inner
        except Exception as error:
            if how == "cause":
                raise outer from error
            if how == "hidden":
                raise outer from None
            raise outer  # noqa: B904
    except Exception as error:
        return error


def test_what_led_to_an_error_counts():
    inner = RuntimeError(CUDA_OLD)
    assert oom.recognise(raised(ValueError("in layer 3"), inner, "cause")).source == "cuda"
    assert oom.recognise(raised(ValueError("in layer 3"), inner, "context")).source == "cuda"
    assert oom.recognise(raised(ValueError("in layer 3"), inner, "hidden")) is None
    assert oom.recognise(raised(CannotFit("nothing is left"), inner, "cause")) is None
    assert oom.recognise(raised(RuntimeError("stopped"), CannotFit("out of memory"), "cause")) is None
    assert oom.recognise(ExceptionGroup("two", [ValueError(), MemoryError()])).source == "python"


def test_a_chain_that_is_a_ring_ends():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert oom.recognise(first) is None


def of_worker(error, where="in DataLoader worker process 0"):
    """The exception as the main process gets it."""
    try:
        raise error
    except Exception:
        wrapper = ExceptionWrapper(where=where)
    try:
        wrapper.reraise()
    except Exception as again:
        return again


def numpy_error():
    try:
        np.empty((2**40, 2**10), dtype=np.float32)
    except MemoryError as error:
        return error


def test_errors_of_workers_and_replicas():
    failure = oom.recognise(of_worker(RuntimeError(CPU.format("alloc_cpu.cpp:9", "", "can't allocate memory", 99))))
    assert (failure.where, failure.source, failure.requested_bytes) == (HOST, "torch", 99)
    assert oom.recognise(of_worker(MemoryError())).source == "python"
    failure = oom.recognise(of_worker(numpy_error()))
    assert (failure.source, failure.requested_bytes) == ("numpy", 2**52)
    replica = of_worker(torch.OutOfMemoryError(CUDA_OLD), "in replica 1 on device 1")
    assert oom.recognise(replica).requested_bytes == 256 * MIB
    assert oom.recognise(of_worker(RuntimeError(CUDA_OLD), "in replica 1 on device 1")).source == "cuda"
    # The text of the worker's source code isn't its message.
    assert oom.recognise(of_worker(RuntimeError("wrong shape"))) is None  # CUDA out of memory
    assert oom.recognise(of_worker(ValueError("CUDA out of memory"))) is None
    assert oom.recognise(of_worker(KeyError("out of memory"))) is None
    assert oom.recognise(of_worker(RuntimeError("Tried to allocate more than 1EB memory: out of memory"))) is None


# Errors that are provoked.

PROVOKED = """
import json, mmap, resource, sys, threading
import numpy, torch
from memfit.core import oom

data = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))
values, convolution = torch.randn(16, 64, 32, 32), torch.nn.Conv2d(64, 64, 3)
resource.setrlimit(resource.RLIMIT_DATA, (data + (16 << 20), -1))
ways = {
    "tensor": lambda: torch.empty(1 << 28),
    "sort": lambda: torch.empty(1).expand(1 << 28).sort(),
    "convolution": lambda: convolution(values.expand(64, 16, 64, 32, 32).reshape(-1, 64, 32, 32)),
    "array": lambda: numpy.zeros(1 << 28),
    "bytes": lambda: bytearray(1 << 28),
    "mapping": lambda: mmap.mmap(-1, 1 << 28, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
    "list": lambda: [None] * (1 << 28),
}
threading.stack_size(256 << 20)
ways["thread"] = lambda: threading.Thread(target=print).start()
found = {}
for name, way in ways.items():
    try:
        way()
    except BaseException as error:
        failure = oom.recognise(error)
        found[name] = failure and [str(failure.where), failure.source, failure.requested_bytes]
json.dump(found, sys.stdout)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of memory are set as on Linux")
def test_errors_under_a_real_limit():
    finished = subprocess.run([sys.executable, "-c", PROVOKED], capture_output=True, text=True, timeout=100, check=True)
    assert json.loads(finished.stdout) == {
        "tensor": ["host", "torch", 2**30],
        "sort": ["host", "torch", 2**30],
        "convolution": ["host", "torch", 64 * 16 * 64 * 32 * 32 * 4],
        "array": ["host", "numpy", 2**31],
        "bytes": ["host", "python", None],
        "mapping": ["host", "python", None],
        "list": ["host", "python", None],
        "thread": ["host", "threads", None],
    }


# What an exception holds.


def fail_with_tensor(references):
    large = torch.ones(1000)
    references.append(weakref.ref(large))
    try:
        fail_deeper(references)
    except RuntimeError as error:
        raise ValueError("in layer 3") from error


def fail_deeper(references):
    other = torch.ones(1000)
    references.append(weakref.ref(other))
    raise RuntimeError(CUDA_OLD)


def test_cleared_exceptions_hold_nothing():
    references = []
    gc.disable()
    try:
        try:
            fail_with_tensor(references)
        except ValueError as error:
            held = error
        # GIVEN an exception that is kept, as a debugger or a logger would; it keeps the tensors.
        assert [reference() is None for reference in references] == [False, False]
        oom.clear_frames(held)
        assert [reference() is None for reference in references] == [True, True]
    finally:
        gc.enable()
    assert held.__cause__ is not None
    assert "".join(traceback.format_exception(held)).count("Traceback") == 0


def test_functions_that_still_run_keep_their_variables():
    kept = torch.ones(3)
    try:
        fail_deeper([])
    except RuntimeError as error:
        oom.clear_frames(error)
    assert kept.sum() == 3


def test_only_what_ran_out_is_caught():
    def run_out():
        raise MemoryError("no memory")

    def fail():
        raise KeyError("labels")

    assert oom.caught(lambda: None) is None
    failure = oom.caught(run_out)
    assert failure is not None and failure.where is Where.HOST
    with pytest.raises(KeyError):
        oom.caught(fail)

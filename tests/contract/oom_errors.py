"""Errors that frameworks raise when memory runs out, word by word, and errors that only look like them."""

PLAIN_IMPOSTORS = (
    ValueError("choose a batch_size with which the model does not run out of memory"),
    RuntimeError("the page about Out of memory errors explains this"),
    KeyError("out of memory"),
)
"""Of no framework: a user's own code may say such things."""


def of_python():
    return [MemoryError("Unable to allocate 7.45 GiB for an array with shape (1000000000,) and data type float64")]


def of_torch():
    import torch

    host = (
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 800000000 bytes. Error code 12 (Cannot allocate memory)"
    )
    device = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which 1.12 GiB is "
        "free. Including non-PyTorch memory, this process has 22.56 GiB memory in use."
    )
    library = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    return [RuntimeError(host), torch.OutOfMemoryError(device), RuntimeError(library)]


def torch_impostors():
    triton = "out of resource: shared memory, Required: 132096, Hardware limit: 101376. Reducing block sizes may help."
    return [RuntimeError(triton), RuntimeError("CUDA error: device-side assert triggered")]


def jax_error():
    import jax

    # Releases before 0.4.36 have it in jaxlib alone.
    return getattr(jax.errors, "JaxRuntimeError", None) or jax.lib.xla_extension.XlaRuntimeError


def of_jax():
    kind, text = jax_error(), "Out of memory allocating 800000000 bytes."
    return [
        kind(f"RESOURCE_EXHAUSTED: {text}"),
        ValueError(f"RESOURCE_EXHAUSTED: {text}"),
        kind(f"INTERNAL: Error dispatching computation: {text}"),
    ]


def jax_impostors():
    kind = jax_error()
    return [
        kind("RESOURCE_EXHAUSTED: Received message larger than max (5242880 vs. 4194304)"),
        kind("INVALID_ARGUMENT: Argument does not match host shape or layout of computation parameter 0"),
    ]


def of_tensorflow():
    from tensorflow import errors

    tensor = (
        "OOM when allocating tensor with shape[8192,8192] and type float on "
        "/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc"
    )
    return [
        errors.ResourceExhaustedError(None, None, tensor),
        errors.InternalError(None, None, "Failed to allocate request for 2.00GiB (2147483648B) on device ordinal 0"),
        errors.InternalError(None, None, "Dst tensor is not initialized."),
    ]


def tensorflow_impostors():
    from tensorflow import errors

    return [
        errors.ResourceExhaustedError(None, None, "/data/train.tfrecord; Too many open files"),
        errors.InternalError(None, None, "Blas GEMM launch failed : a.shape=(4, 5), b.shape=(5, 7)"),
    ]

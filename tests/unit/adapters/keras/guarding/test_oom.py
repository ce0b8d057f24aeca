"""Which errors count as running out of memory."""

import pytest

from memfit.adapters.keras.guarding.oom import clear, recognise, release
from memfit.core.errors import BadInput
from memfit.core.guarding import Where


class OpError(Exception):
    pass


class ResourceExhaustedError(OpError):
    pass


class InternalError(OpError):
    pass


class JaxRuntimeError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "source", "where", "requested"),
    [
        (
            ResourceExhaustedError("OOM when allocating tensor with shape[64,100] and type float on /device:GPU:0"),
            "tensorflow",
            Where.DEVICE,
            25600,
        ),
        (
            ResourceExhaustedError("Out of memory while trying to allocate 1810662340 bytes. [Op:__inference]"),
            "tensorflow",
            Where.HOST,
            1810662340,
        ),
        (InternalError("CUDA_ERROR_OUT_OF_MEMORY: out of memory"), "tensorflow", Where.DEVICE, None),
        (InternalError("Dst tensor is not initialized."), "tensorflow", Where.DEVICE, None),
        (
            JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 800000000 bytes."),
            "xla",
            Where.HOST,
            800000000,
        ),
        (ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."), "xla", Where.HOST, 8),
        (
            JaxRuntimeError("INTERNAL: Error dispatching computation: Out of memory allocating 3159088232 bytes."),
            "xla",
            Where.HOST,
            3159088232,
        ),
        (MemoryError("no"), "python", Where.HOST, None),
    ],
)
def test_failures_of_each_backend_are_recognised(error, source, where, requested):
    found = recognise(error)

    assert found is not None
    assert found.source == source
    assert found.where == where
    assert found.requested_bytes == requested


@pytest.mark.parametrize(
    "error",
    [
        ResourceExhaustedError("Too many open files"),
        InternalError("Blas GEMM launch failed: shapes differ"),
        ValueError("please avoid running out of memory"),
        KeyboardInterrupt(),
        BadInput("RESOURCE_EXHAUSTED: out of memory"),
    ],
)
def test_other_errors_are_not(error):
    assert recognise(error) is None


def test_failures_of_pytorch_are_recognised_where_it_runs():
    pytest.importorskip("torch")
    found = recognise(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    assert (found.source, found.requested_bytes) == ("torch", 8)


def test_a_graph_that_finds_no_memory_is_recognised():
    errors = pytest.importorskip("google.protobuf.message")
    text = "Error parsing message with type 'tensorflow.FunctionDef': Arena alloc failed"

    found = recognise(errors.DecodeError(text))

    assert (found.source, found.where, found.text) == ("protobuf", Where.HOST, text)
    assert recognise(errors.DecodeError("Error parsing message: Wire format was corrupt")) is None


def test_what_an_error_was_raised_from_counts():
    try:
        try:
            raise MemoryError
        except MemoryError as cause:
            raise KeyError("a batch") from cause
    except KeyError as error:
        assert recognise(error).source == "python"
        clear(error)
        assert error.__traceback__ is None


def test_memory_is_given_back():
    release()

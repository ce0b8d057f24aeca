import pytest

from memfit.catalogue import find_device, list_devices
from memfit.catalogue.stacks import kernels_bytes, on_stack
from memfit.core.device import Kind, Origin
from memfit.core.errors import BadInput
from memfit.core.stack import read_stack
from memfit.core.units import GIB


def test_a_device_runs_the_stack_that_is_asked_for():
    device = find_device("t4", stack="torch2.4-cu124")

    assert device.stack == read_stack("torch2.4-cu124")
    assert find_device("t4").stack is None
    assert on_stack(device, None) is device
    assert find_device("24GiB", stack="torch2.4").stack.cuda == (12, 1)


@pytest.mark.parametrize(
    ("name", "stack", "words"),
    [
        ("rtx-3090", "torch1.12-cu102", "(compute capability 8.6); this one does: torch1.12-cu113"),
        ("h100-80gb", "torch1.12-cu113", "use another release"),
        ("rtx-5090", "torch2.4", "no kernels for"),
        ("v100-16gb", "torch2.11", "this one does: torch2.11-cu126"),
    ],
)
def test_a_stack_without_kernels_for_the_device_is_refused(name, stack, words):
    with pytest.raises(BadInput) as refusal:
        find_device(name, stack=stack)

    assert words in str(refusal.value)


def test_todays_stacks_run_on_every_device_that_they_were_built_for():
    for device in list_devices():
        if device.kind is Kind.CUDA and device.capability >= (7, 5):
            assert find_device(device.name, stack="torch2.13").stack.torch == (2, 13)


def test_kernels_are_part_of_the_context_where_they_are_loaded_at_once():
    today, lazy, eager = (find_device("rtx-3090", stack=stack) for stack in (None, "torch1.13", "torch1.12-cu113"))

    assert lazy.context_bytes == today.context_bytes
    assert eager.context_bytes - today.context_bytes == kernels_bytes(eager.stack, (8, 6))
    # PyTorch's, those of cuBLAS and of cuDNN: 432 + 324 + 295 MiB.
    assert 1.25 * GIB < eager.context_bytes < 1.31 * GIB
    assert eager.context_origin is Origin.ASSUMED
    # CUDA 11.6 can't load lazily, whatever PyTorch asks for.
    assert kernels_bytes(read_stack("torch1.13-cu116"), (8, 6)) == kernels_bytes(eager.stack, (8, 6))
    assert kernels_bytes(eager.stack, (7, 5)) < kernels_bytes(eager.stack, (8, 6))
    assert find_device("cpu", stack="torch1.12").context_bytes is None

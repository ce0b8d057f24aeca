import pytest

from memfit.catalogue import find_device, list_devices
from memfit.catalogue.stacks import on_stack
from memfit.core.device import Kind
from memfit.core.errors import BadInput
from memfit.core.stack import read_stack


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

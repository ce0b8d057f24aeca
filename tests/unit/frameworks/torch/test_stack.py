import pytest
import torch

from memfit.catalogue import find_device
from memfit.core.stack import read_stack, read_version
from memfit.core.units import KIB, MIB
from memfit.frameworks.torch import stack


def test_the_installed_stack_is_the_one_that_runs():
    installed = stack.installed_stack()

    assert installed.is_installed
    assert installed.torch == read_version(torch.__version__)
    assert (None if installed.cuda is None else ".".join(map(str, installed.cuda))) == torch.version.cuda


@pytest.mark.parametrize(
    ("written", "cuda"),
    [("2.9.1+cu128", (12, 8)), ("2.9.1+cpu", None), ("2.9.1+rocm6.4", None), ("2.9.1", (12, 8)), ("2.4.0", (12, 1))],
)
def test_the_build_is_read_from_the_version(monkeypatch, written, cuda):
    monkeypatch.setattr(stack, "_written", lambda package: written if package == "torch" else "")

    installed = stack.installed_stack.__wrapped__()

    assert (installed.cuda, installed.peft) == (cuda, None)


def test_without_pytorch_there_is_none(monkeypatch):
    monkeypatch.setattr(stack, "_written", lambda package: "")

    assert stack.installed_stack.__wrapped__() is None


def test_what_was_asked_for_runs_on_the_device():
    assert stack.stack_of(find_device("t4", stack="torch2.4")).torch == (2, 4)
    assert stack.stack_of(find_device("t4")) == stack.installed_stack()


@pytest.mark.parametrize(
    ("release", "capability", "size"),
    [
        ("torch1.13", (8, 6), 0),
        ("torch2.0", (8, 6), 8320 * KIB),
        ("torch2.0", (9, 0), 32 * MIB),
        ("torch2.11", (12, 0), 8320 * KIB),
        ("torch2.12", (12, 0), 32 * MIB),
        ("torch2.13", (7, 5), 8320 * KIB),
    ],
)
def test_the_workspace_of_cublas_by_release_and_generation(release, capability, size):
    assert stack.cublas_workspace_bytes(read_stack(release), capability) == size


def test_defaults_by_release():
    def of(release):
        asked = read_stack(release)
        rules = (stack.uses_lists, stack.keeps_roots, stack.fuses_attention, stack.cublaslt_workspace)
        return tuple(rule(asked) for rule in rules)

    assert of("torch1.11") == (False, True, False, (0, False))
    assert of("torch1.13") == (False, True, False, (MIB, False))
    assert of("torch2.0") == (True, True, True, (MIB, False))
    assert of("torch2.8") == (True, False, True, (MIB, False))
    assert of("torch2.10") == (True, False, True, (MIB, True))
    assert of("torch2.11") == (True, False, True, (0, False))


def test_bitsandbytes_by_release():
    def of(release):
        asked = read_stack(f"torch2.4-{release}")
        return stack.keeps_4bit_input(asked), stack.keeps_8bit_copy(asked)

    assert of("bitsandbytes0.43.1") == (True, True)
    assert of("bitsandbytes0.43.2") == (False, True)
    assert of("bitsandbytes0.45") == (False, False)
    # Nobody said which one.
    assert of("peft0.7") == (False, False)

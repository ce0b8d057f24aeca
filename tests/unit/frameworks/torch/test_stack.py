import pytest
import torch

from memfit.catalogue import find_device
from memfit.core.stack import read_version
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

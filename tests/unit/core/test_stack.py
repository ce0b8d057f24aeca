import pytest

from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import BadInput
from memfit.core.stack import Stack, builds_of, default_cuda, read_stack, since
from memfit.core.typed_data import made_of


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("torch2.4-cu124", "torch2.4-cu124"),
        ("torch==2.4.1+cu124", "torch2.4.1-cu124"),
        ("2.4.0+cu121", "torch2.4.0-cu121"),
        ("PyTorch2.6", "torch2.6-cu124"),
        ("torch1.12 cuda11.3", "torch1.12-cu113"),
        ("torch2.1-cu121-bnb0.41-peft0.7.1-hf4.36", "torch2.1-cu121-transformers4.36-peft0.7.1-bitsandbytes0.41"),
        ("torch2.4-cu124-driver535.104", "torch2.4-cu124-driver535.104"),
    ],
)
def test_a_stack_is_read_in_every_spelling(text, canonical):
    stack = read_stack(text)

    assert stack.text == canonical
    assert read_stack(canonical) == stack
    assert read_stack(stack) is stack


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("torch2.40-cu124", "no stack with PyTorch 2.40 is known; the nearest: torch2.13-cu126. Known are PyTorch 1.8"),
        ("torch1.14-cu117", "the nearest: torch1.13-cu117"),
        ("torch0.4", "the nearest: torch1.8-cu102"),
        (
            "torch2.4-cu130",
            "PyTorch 2.4 was not built for CUDA 13.0; the nearest: torch2.4-cu124. It was for CUDA 11.8",
        ),
        ("torhc2.4", "'torhc2.4' in the stack 'torhc2.4' is no software that it can name. Did you mean 'torch'"),
        ("banana", "It may name torch, cuda, transformers"),
        ("torch2", "has no version such as torch2.4. Write torch2.4-cu124"),
        ("torch2.4-cu1", "has no version such as cu124"),
        ("torch2.4-peft", "has no version that can be read"),
        ("torch2.4-peft9999999999999", "has no version that can be read"),
        ("torch2.4-torch2.5", "names torch twice"),
        ("cu124", "names no version of PyTorch"),
        ("", "names no version of PyTorch"),
        ("torch2.4" * 50, "no stack has a name of 400 characters"),
        (2.4, "a stack is a text such as 'torch2.4-cu124', but 2.4 was given"),
    ],
)
def test_what_is_no_stack_is_refused_and_the_nearest_named(text, words):
    with pytest.raises(BadInput) as refusal:
        read_stack(text)

    assert words in str(refusal.value)


def test_versions_compare_by_their_numbers():
    stack = read_stack("torch2.4.1")

    assert (2, 4) < stack.torch < (2, 11)
    assert read_stack("torch2.11").torch >= (2, 11)


def test_a_value_holds_from_its_version_on():
    table = {(0,): "loop", (2, 0): "foreach", (2, 11): "fused"}

    assert [since(version, table) for version in ((1, 13, 1), (2, 0), (2, 4, 1), (2, 11, 0), (9, 0))] == [
        "loop",
        "foreach",
        "foreach",
        "fused",
        "fused",
    ]


def test_without_cuda_a_simulated_device_runs_the_usual_build():
    here = Stack((2, 13, 0), None, is_installed=True)

    assert here.device_cuda == default_cuda((2, 13, 0)) == builds_of((2, 13))[0]
    assert str(here) == "Stack PyTorch 2.13.0, CUDA 13.0 (installed, CUDA assumed)"
    assert default_cuda((9, 9)) == default_cuda((2, 13))


def test_stacks_survive_json():
    stack = read_stack("torch2.1-cu121-peft0.7")
    plain = {"torch": [2, 1], "cuda": [12, 1], "peft": [0, 7], "transformers": None}

    assert made_of(Stack, plain) == stack


def test_a_device_names_its_software():
    stack = read_stack("torch2.4-cu124-peft0.7")

    assert stack.described() == ("PyTorch 2.4, CUDA 12.4, peft 0.7", "as asked")
    assert stack.described(on_cuda=False) == ("PyTorch 2.4, peft 0.7", "as asked")
    assert str(Device("x", "X", Kind.CUDA, None, None, Origin.ASSUMED, stack=stack)).endswith("CUDA 12.4, peft 0.7")
    assert str(Device("x", "X", Kind.HOST, None, None, Origin.ASSUMED, stack=stack)).endswith("PyTorch 2.4, peft 0.7")

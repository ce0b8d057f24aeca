import copy
import importlib
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from memfit.core.patching import replaced
from memfit.frameworks.torch.shapes import unsimulated
from memfit.frameworks.torch.shapes.unsimulated import (
    COMPILED_AS_EAGER,
    compilation_replacements,
    state_of,
    update_replacements,
)
from tests.unit.frameworks.torch.sessions import running


def make_extensions():
    """PyTorch's module that compiles extensions, as far as it is used here: it says what it was given."""
    module = ModuleType("cpp_extension")
    module.load = lambda name, sources, *args, **kwargs: (name, sources, args, kwargs)
    module.load_inline = lambda name, cpp_sources, cuda_sources=None, *args, **kwargs: (name, cpp_sources, cuda_sources)
    return module


CUDA_EXTENSIONS = {
    "a file": lambda module: module.load("fast", "kernel.cu"),
    "one of several files": lambda module: module.load("fast", ["binding.cpp", "kernel.cuh"]),
    "by name": lambda module: module.load(name="fast", sources=["binding.cpp"], with_cuda=True),
    "in the script": lambda module: module.load_inline("fast", "int f();", "__global__ void k();"),
    "in the script, by name": lambda module: module.load_inline("fast", cpp_sources="", cuda_sources=["void k();"]),
    "in the script, as CUDA": lambda module: module.load_inline("fast", "int f();", with_cuda=True),
}


@pytest.mark.parametrize("kind", CUDA_EXTENSIONS)
def test_extensions_for_cuda_are_refused_at_once(kind):
    module = make_extensions()
    refused = pytest.raises(ImportError, match=r"'fast' is a CUDA extension.* plain PyTorch path")
    # An ImportError, after which many scripts go another way.
    with replaced(unsimulated.extension_replacements(module)), refused:
        CUDA_EXTENSIONS[kind](module)


def test_extensions_for_the_host_are_compiled_as_ever():
    module = make_extensions()
    with replaced(unsimulated.extension_replacements(module)):
        assert module.load("slow", ["a.cpp"], ["-O3"], verbose=True) == (
            "slow",
            ["a.cpp"],
            (["-O3"],),
            {"verbose": True},
        )
        assert module.load_inline("slow", "int f();") == ("slow", "int f();", None)


def test_in_a_session_a_script_with_an_extension_takes_its_other_way():
    plain = importlib.import_module(unsimulated.EXTENSIONS).load_inline
    with running():
        from torch.utils.cpp_extension import load_inline

        try:
            load_inline("fast", cpp_sources="", cuda_sources="__global__ void k() {}")
            way = "kernel"
        except ImportError:
            way = "plain"

    assert way == "plain"
    assert importlib.import_module(unsimulated.EXTENSIONS).load_inline is plain


def test_nothing_is_compiled_and_it_is_said_once():
    notes = []

    with replaced(compilation_replacements(lambda code, text: notes.append((code, text)))):
        model = nn.Linear(2, 2)
        assert torch.compile(model, mode="max-autotune") is model
        model.compile(fullgraph=True)

        @torch.compile
        def plain(value):
            return value + 1

        @torch.compile(dynamic=True)
        def with_options(value):
            return value + 2

        assert (plain(1), with_options(1)) == (2, 3)

    assert notes == [
        (COMPILED_AS_EAGER, "torch.compile was treated as eager execution, which may need more memory"),
    ]


def test_what_pytorch_compiles_to_check_functions_is_not_the_programs():
    notes = []

    def _flex_attention_hop_wrapper():
        return 3

    with replaced(compilation_replacements(lambda code, text: notes.append(code))):
        assert torch.compile(_flex_attention_hop_wrapper, backend="eager")() == 3
    assert notes == []


def test_nothing_is_said_where_nothing_is_compiled():
    notes = []

    with replaced(compilation_replacements(lambda code, text: notes.append(code))):
        torch.compile(dynamic=True)

    assert notes == []


def test_the_given_model_is_found_where_programs_look_for_it():
    with replaced(compilation_replacements(lambda code, text: None)):
        model = torch.compile(nn.Sequential(nn.Linear(2, 2)))

    assert model._orig_mod is model
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    assert len(list(model.modules())) == 2
    twin = copy.deepcopy(model)
    assert twin._orig_mod is twin


def test_afterwards_compilation_is_back():
    before = torch.compile, nn.Module.compile

    with replaced(compilation_replacements(lambda code, text: None)):
        assert torch.compile is not before[0]

    assert (torch.compile, nn.Module.compile) == before


def make_module():
    """Keras's module of optimizers, as far as it is used here."""

    class BaseOptimizer:
        def apply(self, grads, trainable_variables=None):
            return self, grads, trainable_variables

    module = ModuleType("optimizers")
    module.BaseOptimizer = BaseOptimizer
    return module


def test_updates_are_heard_of_before_and_after():
    module, heard = make_module(), []
    optimizer = type("Adam", (module.BaseOptimizer,), {})()
    given = update_replacements(module, lambda o: heard.append(("begin", o)), lambda o: heard.append(("end", o)))
    with replaced(given):
        assert optimizer.apply([1], [2]) == (optimizer, [1], [2])
        assert optimizer.apply([1]) == (optimizer, [1], None)
        assert optimizer.apply(grads=[1], trainable_variables=[2]) == (optimizer, [1], [2])

    assert heard == [("begin", optimizer), ("end", optimizer)] * 3


def test_asking_changes_nothing_and_afterwards_nothing_is_heard():
    module, heard = make_module(), []
    plain = module.BaseOptimizer.apply
    given = update_replacements(module, heard.append, heard.append)
    assert module.BaseOptimizer.apply is plain
    with replaced(given):
        assert module.BaseOptimizer.apply is not plain

    assert module.BaseOptimizer.apply is plain
    module.BaseOptimizer().apply([1])
    assert heard == []


def test_the_tensors_of_an_optimizer():
    tensors = [torch.zeros(2), torch.zeros(3)]
    optimizer = SimpleNamespace(variables=[SimpleNamespace(value=tensor) for tensor in tensors])

    assert state_of(optimizer) == tensors

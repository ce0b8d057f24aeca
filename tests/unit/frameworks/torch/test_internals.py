"""Private names of PyTorch: all are here, and one that is gone gives one clear message."""

import ast
import importlib
from pathlib import Path

import pytest
import torch

from memfit.core.errors import MissingDependency
from memfit.frameworks.torch import internals

SOURCES = Path(internals.__file__).parents[2]

# PyTorch's compiler loads parts of PyTorch that PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("name", sorted(internals._PATHS))
def test_this_release_has_every_name(name):
    assert getattr(internals, name) is not None


def test_the_table_is_in_alphabetical_order():
    assert list(internals._PATHS) == sorted(internals._PATHS, key=str.lower)


def test_every_use_names_something_that_is_there():
    unknown = []
    for path in SOURCES.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "internals"
        }
        if "memfit.frameworks.torch import internals" in ast.unparse(tree):
            unknown += [f"{path.name}: {name}" for name in names if not hasattr(internals, name)]
    assert unknown == []


def test_a_missing_name_says_which_and_in_which_release(monkeypatch):
    monkeypatch.setitem(internals._PATHS, "gone", "torch._C._gone_for_good")
    with pytest.raises(MissingDependency, match=rf"torch\._C\._gone_for_good.*{torch.__version__[:4]}.*2\.6"):
        internals.gone  # noqa: B018
    with pytest.raises(MissingDependency, match=r"Linear\._gone"):
        internals.NAMES.of(torch.nn.Linear(1, 1), "_gone")
    with pytest.raises(AttributeError, match="no attribute 'never_was'"):
        internals.never_was  # noqa: B018


def test_writes_are_counted_where_there_is_a_count():
    tensor = torch.zeros(1)
    before = internals.version_of(tensor)
    tensor.add_(1)
    with torch.inference_mode():
        uncounted = torch.zeros(1)
    assert internals.version_of(tensor) == before + 1
    assert internals.version_of(uncounted) == -1


def test_compilation_is_off_inside_and_as_it_was_afterwards():
    compiled = []

    def backend(graph, inputs):
        compiled.append(len(inputs))
        return graph.forward

    double = torch.compile(lambda x: 2 * x, backend=backend)
    with pytest.raises(KeyError), internals.without_compiler():
        assert double(torch.ones(2)).tolist() == [2, 2]
        assert not compiled
        raise KeyError

    # What ran meanwhile is compiled from now on.
    assert double(torch.ones(2)).tolist() == [2, 2]
    assert compiled == [1]


def test_attention_of_nested_tensors_asks_what_is_named():
    names = vars(importlib.import_module(internals.NESTED_ATTENTION))
    assert {internals.IS_ATTENTION_ON_SHAPES, internals.SELECT_ATTENTION} <= names.keys()
    assert (
        type(torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)).__module__ == internals.NESTED_TENSORS
    )


def test_functions_that_check_a_program_are_told_from_the_program_s():
    module = importlib.import_module("torch._higher_order_ops.cond")
    assert internals.checks_program(module.trace_cond) and not internals.checks_program(len)

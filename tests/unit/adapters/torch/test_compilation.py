import copy

import torch
from torch import nn

from memfit.adapters.torch.compilation import COMPILED_AS_EAGER, compilation_replacements
from memfit.adapters.torch.replacement import replaced


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

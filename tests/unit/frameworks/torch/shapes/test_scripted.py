import pytest
import torch
from torch import nn

from memfit.core.patching import replaced
from memfit.frameworks.torch.shapes.scripted import SCRIPT_NOT_SAVED, compiled, script_replacements


@pytest.fixture
def notes():
    found = []
    with replaced(script_replacements(lambda code, text: found.append((code, text)))):
        yield found


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.graph = "of its own"

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize(
    "make", [lambda net: torch.jit.script(net), lambda net: torch.jit.trace(net, torch.ones(1, 3))]
)
def test_a_compiled_module_shares_everything_with_the_plain_one(notes, make):
    net = Net()
    made = make(net)

    assert isinstance(made, Net)
    assert (type(made).__name__, type(made).__module__) == ("Net", __name__)
    assert made.layer is net.layer
    assert torch.equal(made(torch.ones(2, 3)), net(torch.ones(2, 3)))
    assert made.graph == "of its own"


def test_it_has_a_graph_for_pictures_and_saves_nothing(notes, tmp_path):
    net = nn.Sequential(nn.Linear(3, 2))
    made = torch.jit.trace(net, (torch.ones(1, 3),))
    made.save(tmp_path / "model.pt")
    torch.jit.save(made, "model.pt")

    assert list(made.graph.nodes()) == list(made.inlined_graph.nodes()) == []
    assert [code for code, text in notes] == [SCRIPT_NOT_SAVED] * 2
    assert not list(tmp_path.iterdir())
    assert not hasattr(net, "graph")


def test_tracing_calls_the_module_with_its_example(notes):
    given = []

    def function(*arguments, **named):
        given.append((arguments, named))

    assert torch.jit.trace(function, torch.ones(1)) is function
    torch.jit.trace(function, (1, 2))
    torch.jit.trace(function, example_kwarg_inputs={"x": 3})

    assert given == [((torch.ones(1),), {}), ((1, 2), {}), ((), {"x": 3})]


def test_functions_and_frozen_modules_are_what_they_were(notes):
    net = nn.Linear(1, 1)

    assert torch.jit.script(abs) is abs
    assert compiled("text", print) == "text"
    assert torch.jit.freeze(net) is torch.jit.optimize_for_inference(net) is net

import gc
import os
import sysconfig

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit.core.timeline import Category, Phase
from memfit.frameworks.torch.shapes.origin import OriginTracker
from tests.unit.frameworks.torch.builders import forward_blocks, line_of, made_in, run
from tests.unit.frameworks.torch.sessions import made, running

DATA = torch.empty(4, 6)
FILE = "test_origin.py"


class Leaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 6))

    def forward(self, data):
        return torch.mm(data, self.weight).sin()


class Tree(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = Leaf()
        self.right = nn.Sequential(Leaf(), nn.Tanh())

    def forward(self, data):
        return self.left(data) * self.right(data)


LEAF_LINE = line_of(Leaf.forward)
TREE_LINE = line_of(Tree.forward)


def origins(blocks, op):
    return [(b.module, b.source.rpartition("/")[2]) for b in blocks if b.op == f"aten.{op}"]


def test_forward_blocks_have_module_and_line():
    blocks = forward_blocks(run(Tree(), DATA))

    assert origins(blocks, "mm") == [("left", f"{FILE}:{LEAF_LINE}"), ("right.0", f"{FILE}:{LEAF_LINE}")]
    assert origins(blocks, "tanh") == [("right.1", f"{FILE}:{TREE_LINE}")]
    assert origins(blocks, "mul") == [("", f"{FILE}:{TREE_LINE}")]


def test_backward_blocks_have_those_of_the_forward_operator():
    blocks = made_in(run(Tree(), DATA), Phase.BACKWARD)

    assert origins(blocks, "tanh_backward") == [("right.1", f"{FILE}:{TREE_LINE}")]
    # A sine's gradient is a cosine times the gradient.
    assert sorted(origins(blocks, "cos")) == [("left", f"{FILE}:{LEAF_LINE}"), ("right.0", f"{FILE}:{LEAF_LINE}")]
    assert sorted(m for m, _ in origins(blocks, "mm")) == ["left", "right.0"]


def test_gradients_and_optimizer_state_belong_to_the_module_of_their_parameter():
    traced = run(Tree(), DATA, optimizer=torch.optim.Adam)

    for category in (Category.GRADIENT, Category.OPTIMIZER_STATE):
        modules = {b.module for b in traced.timeline.blocks if b.category is category}
        assert modules == {"left", "right.0"}


def test_the_loss_itself_belongs_to_no_module():
    def loss(model, batch):
        return model(batch).exp().mean()

    blocks = forward_blocks(run(Tree(), DATA, loss=loss))

    assert origins(blocks, "exp") == [("", f"{FILE}:{line_of(loss)}")]


def test_a_users_own_autograd_function_has_its_module_and_line_in_both_passes():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, data):
            ctx.save_for_backward(data)
            return data.square()

        @staticmethod
        def backward(ctx, gradient):
            (data,) = ctx.saved_tensors
            return gradient.cosh() * data

    class Squared(nn.Module):
        def forward(self, data):
            return Square.apply(data)

    traced = run(nn.Sequential(nn.Linear(6, 6), Squared()), DATA)

    assert {m for m, _ in origins(forward_blocks(traced), "pow")} == {"1"}
    assert {m for m, _ in origins(made_in(traced, Phase.BACKWARD), "cosh")} == {"1"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_blocks_have_their_module(reentrant):
    class Checkpointed(Tree):
        def forward(self, data):
            return checkpoint(self.right, self.left(data), use_reentrant=reentrant)

    blocks = made_in(run(Checkpointed(), DATA), Phase.BACKWARD)

    assert ("right.0", f"{FILE}:{LEAF_LINE}") in origins(blocks, "sin")
    assert {m for m, _ in origins(blocks, "tanh_backward")} == {"right.1"}


def test_buffers_that_change_take_no_origin_from_others():
    # GIVEN batch norm, which counts its batches in a buffer between two operators
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())

    blocks = made_in(run(model, torch.empty(2, 3, 4, 4)), Phase.BACKWARD)

    assert {m for m, _ in origins(blocks, "native_batch_norm_backward")} == {"1"}
    assert {b.module for b in blocks if b.op == "aten.convolution_backward"} == {"0"}
    assert {m for m, _ in origins(blocks, "threshold_backward")} == {"2"}


def test_what_the_framework_does_by_itself_has_no_line():
    # The line that asked for the trace is not part of the step.
    traced = run(Tree(), DATA, optimizer=torch.optim.Adam)

    sources = {b.source for b in traced.timeline.blocks if b.phase in (Phase.SETUP, Phase.OPTIMIZER)}
    assert sources == {""}


def test_a_module_used_outside_of_the_model_belongs_to_its_caller():
    stranger = nn.Tanh()

    class Host(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Leaf()
            self.hidden = [stranger]

        def forward(self, data):
            return self.hidden[0](self.inner(data))

    blocks = forward_blocks(run(nn.Sequential(Host()), DATA))

    assert [m for m, _ in origins(blocks, "tanh")] == ["0"]


def test_calls_of_modules_are_followed_only_inside():
    plain = nn.Module.__call__
    tracker = OriginTracker(nn.Identity())
    with pytest.raises(KeyError), tracker.following():
        assert nn.Module.__call__ is not plain
        raise KeyError
    assert nn.Module.__call__ is plain


@pytest.fixture
def tracker():
    """A tracker of models that nobody has told it of, and what it heard."""
    heard = []
    made = OriginTracker(
        met=lambda module, name: heard.append(("met", module, name)),
        entered=lambda module: heard.append(("entered", module)),
    )
    with made.following():
        yield made, heard


class Reporting(nn.Module):
    """Says where it is when it is called."""

    def __init__(self, tracker, inner=None):
        super().__init__()
        self.tracker, self.inner = [tracker], inner
        self.weight = nn.Parameter(torch.zeros(1))
        self.paths = []

    def forward(self, data):
        self.paths.append(self.tracker[0].current()[0])
        return data if self.inner is None else self.inner(data)


def test_a_model_is_met_when_it_is_called(tracker):
    tracker, heard = tracker
    leaf = Reporting(tracker)
    model = nn.Sequential(nn.Identity(), leaf)
    assert heard == []
    model(torch.zeros(1))
    model(torch.zeros(1))

    # Met once, entered each time; its parts are neither.
    assert heard == [("met", model, ""), ("entered", model), ("entered", model)]
    assert leaf.paths == ["1", "1"]
    assert tracker.current()[0] == ""


def test_a_second_model_has_its_own_name(tracker):
    tracker, heard = tracker
    first, second = Reporting(tracker), Reporting(tracker, Reporting(tracker))
    first(torch.zeros(1))
    second(torch.zeros(1))

    assert [event[2] for event in heard if event[0] == "met"] == ["", "Reporting"]
    assert (first.paths, second.paths, second.inner.paths) == ([""], ["Reporting"], ["Reporting.inner"])


def test_a_loss_or_a_transform_without_parameters_is_not_the_model(tracker):
    tracker, heard = tracker
    nn.ReLU()(torch.zeros(1))
    model = nn.Sequential(Reporting(tracker))
    model(torch.zeros(1))
    nn.MSELoss()(torch.zeros(1), torch.zeros(1))

    assert [event[2] for event in heard if event[0] == "met"] == ["ReLU", "", "MSELoss"]
    assert model[0].paths == ["0"]


def test_a_part_that_is_called_by_itself_is_known_by_its_path(tracker):
    tracker, heard = tracker
    model = nn.Sequential(Reporting(tracker), Reporting(tracker))
    model(torch.zeros(1))
    model[1](torch.zeros(1))

    assert model[1].paths == ["1", "1"]
    assert heard[-1] == ("entered", model[1])
    assert len([event for event in heard if event[0] == "met"]) == 1


def test_a_module_inside_of_a_model_that_is_no_part_of_it_belongs_to_its_caller(tracker):
    tracker, heard = tracker
    stranger = Reporting(tracker)

    class Caller(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = [stranger]
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, data):
            return self.hidden[0](data)

    nn.Sequential(Caller())(torch.zeros(1))

    assert stranger.paths == ["0"]
    assert [event[0] for event in heard] == ["met", "entered"]


def test_a_model_that_is_gone_is_forgotten():
    # GIVEN a model whose number may be given to another one when it is gone
    tracker = OriginTracker()
    model = nn.Sequential(nn.Linear(1, 1))
    with tracker.following():
        model(torch.zeros(1))
    assert len(tracker._paths) == 2

    del model
    gc.collect()
    assert not tracker._paths


def test_models_in_a_session_have_names():
    with running() as session:
        first, second = Leaf().cuda(), nn.Sequential(Leaf()).cuda()
        data = torch.zeros(4, 6).cuda()
        second(first(data)).sum().backward()

    assert [block.module for block in made(session, op="sin", phase=Phase.FORWARD)] == ["", "Sequential.0"]
    assert sorted(block.module for block in made(session, category=Category.GRADIENT)) == ["", "Sequential.0"]
    # A sine's gradient.
    assert sorted(block.module for block in made(session, op="cos")) == ["", "Sequential.0"]


def users(tracker):
    return tracker.user_line()


def test_the_users_line_and_its_text():
    source, text = users(OriginTracker())

    assert source.rpartition("/")[2] == f"{FILE}:{line_of(users)}"
    assert text == "return tracker.user_line()"


def test_the_users_line_is_outside_of_libraries(tmp_path):
    # GIVEN code of a library, called by the user's
    library = os.path.join(sysconfig.get_path("purelib"), "invented.py")
    names = {}
    exec(compile("def call(function):\n    return function()\n", library, "exec"), names)
    tracker = OriginTracker()

    # WHEN the library calls back into PyTorch
    source, text = names["call"](tracker.user_line)

    # THEN it is the user's line that counts, not the library's
    assert source.rpartition("/")[2].startswith(FILE)
    assert text == 'source, text = names["call"](tracker.user_line)'


def test_code_without_a_file_is_nobodys_line():
    names = {"tracker": OriginTracker()}
    exec(compile("found = tracker.user_line()", "<string>", "exec"), names)

    assert names["found"][0].rpartition("/")[2].startswith(FILE)


def test_modules_get_names_and_folders_are_hidden_on_request():
    part = nn.Linear(2, 2)
    shown, hidden = OriginTracker(), OriginTracker(hidden=(os.path.dirname(os.path.abspath(__file__)) + os.sep,))
    shown.name(part, "block.dense")
    shown.name(part, "another")

    assert shown.path(part) == "block.dense"
    assert "test_origin.py:" in shown.source()
    assert "test_origin.py:" not in hidden.source()

import gc

import pytest
import torch
from torch import nn

from memfit.core.timeline import Category, Mark, Phase
from memfit.frameworks.torch.shapes.recorder import Kept, Recorder, is_accumulated_in_place, references_of_sole_owner
from tests.unit.frameworks.torch.builders import made_in, run, sizes, total


@pytest.fixture
def recorder():
    return Recorder(lambda: ("module", "file.py:1"))


def empty(count):
    return torch.empty(count, dtype=torch.uint8, device="meta")


def spans(timeline):
    return [(b.size_bytes, b.start, b.end) for b in timeline.blocks]


def test_a_block_lives_from_its_tensor_to_the_last_holder_of_its_storage(recorder):
    # GIVEN a tensor and a view of it
    tensor = empty(8)
    recorder.add(tensor, "made")
    view = tensor[2:4]

    # WHEN the tensor goes before the view
    del tensor
    other = empty(4)
    recorder.add(other, "other")
    del view

    # THEN the view has kept the block alive
    assert spans(recorder.timeline()) == [(8, 0, 2), (4, 1, None)]


def test_a_known_storage_and_an_empty_one_are_no_blocks(recorder):
    tensor = empty(8)

    assert recorder.add(tensor, "made") == 0
    assert recorder.add(tensor.view(2, 4), "again") is None
    assert recorder.add(empty(0), "nothing") is None
    assert recorder.num_blocks == 1


def test_blocks_carry_phase_origin_and_operator(recorder):
    recorder.enter(Phase.BACKWARD, 2)
    kept = empty(8)
    recorder.add(kept, "aten.mm")

    (block,) = recorder.timeline().blocks
    assert (block.phase, block.module, block.source, block.op) == (Phase.BACKWARD, "module", "file.py:1", "aten.mm")
    assert block.category is Category.TEMPORARY


def test_a_named_tensor_brings_its_own_origin(recorder):
    weight = empty(8)
    recorder.add_named(weight, "parameter", Category.PARAMETER, ("layer", ""))

    (block,) = recorder.timeline().blocks
    assert (block.module, block.source, block.category) == ("layer", "", Category.PARAMETER)


def test_transient_blocks_are_alive_together_and_gone_at_once(recorder):
    recorder.add_inside([8, 0, 4], "inside", Category.WORKSPACE)

    assert spans(recorder.timeline()) == [(8, 0, 3), (4, 1, 2)]


def test_outputs_and_what_is_kept_may_come_between_the_blocks_inside(recorder):
    out = empty(16)
    recorder.add_inside([8, out, Kept(32, "library's workspace"), 4, ~0], "inside", Category.WORKSPACE)

    assert spans(recorder.timeline()) == [(8, 0, 4), (16, 1, None), (32, 2, None), (4, 3, 5)]
    assert [b.op for b in recorder.timeline().blocks][2] == "library's workspace"


def test_a_resized_storage_is_a_new_block(recorder):
    tensor = empty(8)
    recorder.add(tensor, "made")
    tensor.resize_(100)
    recorder.resized(tensor.untyped_storage(), "resize")
    recorder.resized(tensor.untyped_storage(), "resize to the same size")

    assert spans(recorder.timeline()) == [(8, 0, 1), (100, 2, None)]


def test_a_resized_storage_is_followed_to_its_end(recorder):
    tensor = empty(8)
    recorder.add(tensor, "made")
    tensor.resize_(100)
    recorder.resized(tensor.untyped_storage(), "resize")
    del tensor
    gc.collect()

    assert spans(recorder.timeline()) == [(8, 0, 1), (100, 2, 3)]


def test_only_living_blocks_without_category_are_classified_together(recorder):
    gone, kept, named = empty(1), empty(2), empty(3)
    recorder.add(gone, "gone")
    first = recorder.num_blocks
    recorder.add(kept, "kept")
    recorder.add(named, "named", Category.BUFFER)
    del gone
    late = empty(4)
    recorder.add(late, "late")
    del late

    recorder.classify_live(first, Category.ACTIVATION)

    categories = [b.category for b in recorder.timeline().blocks]
    assert categories == [Category.TEMPORARY, Category.ACTIVATION, Category.BUFFER, Category.TEMPORARY]


def test_whether_something_outlives_a_step(recorder):
    state, output = empty(1), empty(2)
    recorder.add(state, "state", Category.OPTIMIZER_STATE)
    recorder.add(output, "output")

    assert recorder.has_live(0, (Category.OPTIMIZER_STATE,))
    del output
    assert not recorder.has_live(0, (Category.OPTIMIZER_STATE,))


def test_what_is_freed_after_the_end_is_not_recorded(recorder):
    tensor = empty(8)
    recorder.add(tensor, "made")
    recorder.stop()
    del tensor

    assert spans(recorder.timeline()) == [(8, 0, None)]


def test_a_range_can_be_played_twice(recorder):
    # GIVEN a permanent block, and a step that frees what it makes
    weight = empty(100)
    recorder.enter(Phase.SETUP, 0)
    recorder.add(weight, "weight", Category.PARAMETER)
    start = len(recorder.events)
    recorder.enter(Phase.FORWARD, 1)
    tensor = empty(8)
    recorder.add(tensor, "made")
    recorder.add_permanent(50, "workspace", Category.WORKSPACE)
    del tensor
    end = len(recorder.events)

    # WHEN the step is played twice
    timeline = recorder.timeline([(0, start), (start, end), (start, end)])

    # THEN its block is allocated anew, the permanent one is not, and the second is step 2
    assert spans(timeline) == [(100, 0, None), (8, 1, 3), (50, 2, None), (8, 4, 5)]
    assert timeline.marks == (
        Mark(0, Phase.SETUP, 0),
        Mark(1, Phase.FORWARD, 1),
        Mark(4, Phase.FORWARD, 2),
    )


def test_a_phase_in_which_nothing_happens_has_its_mark(recorder):
    recorder.enter(Phase.FORWARD, 1)
    tensor = empty(8)
    recorder.add(tensor, "made")
    recorder.enter(Phase.BACKWARD, 1)
    recorder.enter(Phase.OPTIMIZER, 1)

    marks = recorder.timeline().marks
    assert [(m.tick, m.phase) for m in marks] == [(0, Phase.FORWARD), (1, Phase.BACKWARD), (1, Phase.OPTIMIZER)]


def test_a_block_of_a_range_that_is_left_out_is_not_freed_in_another(recorder):
    tensor = empty(8)
    recorder.add(tensor, "made")
    middle = len(recorder.events)
    del tensor

    assert spans(recorder.timeline([(middle, middle + 1)])) == []


def test_a_live_block_is_known_by_its_storage(recorder):
    tensor, stranger = empty(8), empty(8)
    recorder.add(tensor, "made")

    assert recorder.known(tensor)
    assert recorder.known(tensor[2:4])
    assert not recorder.known(stranger)


def test_a_block_is_known_as_long_as_it_lives(recorder):
    tensor = empty(8)
    recorder.add(tensor, "made")
    recorder.stop()

    assert not recorder.known(tensor)


def test_a_storage_may_shrink_to_nothing_and_grow_again(recorder):
    # GIVEN a parameter that is let go and brought back, as sharded ones are
    tensor = empty(8)
    recorder.add(tensor, "made", Category.PARAMETER)
    storage = tensor.untyped_storage()
    storage.resize_(0)
    recorder.resized(storage, "resize_")
    assert not recorder.known(tensor)
    storage.resize_(8)
    recorder.resized(storage, "resize_")

    # THEN there is a second block, from then on
    assert recorder.known(tensor)
    assert spans(recorder.timeline()) == [(8, 0, 1), (8, 2, None)]
    del tensor, storage
    assert spans(recorder.timeline()) == [(8, 0, 1), (8, 2, 3)]


def test_a_storage_that_grows_is_for_what_it_was(recorder):
    tensor = empty(8)
    recorder.add(tensor, "made", Category.PARAMETER)
    tensor.untyped_storage().resize_(100)
    recorder.resized(tensor.untyped_storage(), "resize_")

    assert [b.category for b in recorder.timeline().blocks] == [Category.PARAMETER, Category.PARAMETER]


def test_a_storage_that_was_not_known_is_a_block_when_it_grows(recorder):
    tensor = empty(0)
    recorder.add(tensor, "made")
    tensor.untyped_storage().resize_(100)
    recorder.resized(tensor.untyped_storage(), "resize_")

    assert spans(recorder.timeline()) == [(100, 0, None)]


def test_steps_are_those_that_were_entered(recorder):
    # GIVEN two passes in one step, as when gradients accumulate
    for step in (1, 1, 2):
        recorder.enter(Phase.FORWARD, step)
        recorder.enter(Phase.BACKWARD, step)

    assert [mark.step for mark in recorder.timeline().marks] == [1, 1, 1, 1, 2, 2]


def test_what_is_long_gone_can_be_forgotten(recorder):
    # GIVEN blocks of two steps, of which some are gone
    recorder.enter(Phase.FORWARD, 1)
    first = empty(1)
    recorder.add(first, "first")
    gone = empty(2)
    recorder.add(gone, "gone")
    del gone
    recorder.enter(Phase.FORWARD, 2)
    ended = empty(3)
    recorder.add(ended, "ended")
    last = empty(4)
    recorder.add(last, "last")
    del ended
    assert recorder.spans() == ([0, 1, 3, 4], {1: 2, 2: 5})

    # WHEN one of those that are gone is forgotten
    ticks = recorder.keep_only([0, 2, 3])

    # THEN the others are what they were, at the ticks that are left
    assert ticks == [0, 3, 4, 5]
    timeline = recorder.timeline()
    assert spans(timeline) == [(1, 0, None), (3, 1, 3), (4, 2, None)]
    assert [block.op for block in timeline.blocks] == ["first", "ended", "last"]
    assert timeline.marks == (Mark(0, Phase.FORWARD, 1), Mark(1, Phase.FORWARD, 2))
    assert recorder.spans() == ([0, 1, 2], {1: 3})


def test_after_forgetting_blocks_end_change_and_come_as_before(recorder):
    kept, gone = empty(1), empty(2)
    recorder.add(gone, "gone")
    recorder.add(kept, "kept")
    del gone
    recorder.keep_only([1])

    # It is still known, by its new number.
    assert recorder.add(kept, "again") is None
    recorder.classify(kept, Category.PARAMETER, "layer")
    new = empty(3)
    assert recorder.add(new, "new") == 1
    del kept

    timeline = recorder.timeline()
    assert spans(timeline) == [(1, 0, 2), (3, 1, None)]
    assert (timeline.blocks[0].category, timeline.blocks[0].module) == (Category.PARAMETER, "layer")


WIDTH = 10
DATA = torch.empty(4, WIDTH)
ACTIVATION = 4 * WIDTH * 4


def sums(traced):
    """Sizes of the new tensors that sums of gradients made."""
    return sizes(made_in(traced, Phase.BACKWARD), "aten.add")


class Branches(nn.Module):
    """The output of one layer, used `count` times by functions whose gradients are new tensors."""

    def __init__(self, count):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.functions = (torch.sin, torch.cos, torch.tanh, torch.exp)[:count]

    def forward(self, data):
        middle = self.layer(data)
        return torch.cat([function(middle) for function in self.functions])


def test_where_gradients_meet_the_engine_adds_in_place():
    for count in (2, 3, 4):
        assert sums(run(Branches(count), DATA, loss=lambda m, b: m(b).sum())) == []


def test_a_gradient_held_elsewhere_is_not_overwritten():
    # GIVEN a sum whose gradient goes to both of its terms as one tensor, and a further use of each term
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, data):
            left = self.layer(data)
            right = left.sin()
            total = left + right
            return total * total.detach()

    # WHEN the engine adds the gradient of the sine to that of the sum
    traced = run(Residual(), DATA, loss=lambda m, b: m(b).sum())

    # THEN at most one new tensor is needed
    assert sums(traced) in ([], [ACTIVATION])


def test_a_parameter_used_twice_has_one_gradient():
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    model = nn.Sequential(layer, nn.ReLU(), layer)

    traced = run(model, DATA, loss=lambda m, b: m(b).sum())

    # A layer's gradient is a transposed view, which the engine never adds into: both contributions live until their sum
    # is made, as they do in a real run.
    size = WIDTH * WIDTH * 4
    gradients = [b for b in made_in(traced, Phase.BACKWARD) if b.size_bytes == size]
    assert total(gradients, Category.GRADIENT) == size
    assert total(gradients, Category.TEMPORARY) == 2 * size


def test_other_sums_are_not_taken_for_the_engines():
    left, right = torch.empty(3, device="meta"), torch.empty(3, device="meta")

    assert not is_accumulated_in_place((left, right), {}, references_of_sole_owner())


def test_a_sum_in_a_users_backward_function_makes_a_new_tensor():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, data):
            return data * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient + gradient

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, data):
            return Doubled.apply(self.layer(data))

    traced = run(Model(), DATA, loss=lambda m, b: m(b).sin().sum())

    assert sums(traced) == [ACTIVATION]


def test_blocks_know_the_stream_that_they_were_made_on(recorder):
    stream = 0
    recorder.current_stream = lambda: stream
    first, second, third = empty(1), empty(2), empty(3)
    recorder.add(first, "default")
    stream = 7
    recorder.add(second, "side")
    stream = 0
    recorder.add(third, "default again")

    assert [block.stream for block in recorder.timeline().blocks] == [0, 7, 0]
    del first
    recorder.keep_only([1, 2])
    assert [block.stream for block in recorder.timeline().blocks] == [7, 0]

import pytest

from memfit.core.profile import Drop
from memfit.core.settings import OptimizerKernels, OptimizerState, Settings
from memfit.core.timeline import Category
from memfit.core.units import MIB
from memfit.planner.memory import Intervals, StepMemory, UnitMemory, held_segments
from tests.unit.planner.profiles import Chain


@pytest.fixture
def chain():
    return Chain([3, 3, 3])


def memory_of(chain, batch_size=4):
    return StepMemory(chain.profile(batch_size), chain.profile(2 * batch_size))


def test_the_plain_peak_is_that_of_the_timeline(chain):
    profile = chain.profile()
    assert StepMemory(profile).peak(Settings(), 4) == profile.timeline.peak()[1]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 64])
def test_another_batch_size_is_that_of_its_own_profile(chain, batch_size):
    own = chain.profile(batch_size)
    assert memory_of(chain).peak(Settings(), batch_size) == pytest.approx(StepMemory(own).peak(Settings(), batch_size))


def test_without_a_second_profile_no_other_size_is_answered(chain):
    assert not StepMemory(chain.profile()).scales
    assert memory_of(chain).scales


def test_micro_batches_shrink_activations_and_keep_gradients(chain):
    memory = memory_of(chain)
    whole, parts = memory.curve(Settings(), 4), memory.curve(Settings(micro_batches=4), 4)
    # The forward pass of a later part begins with all gradients there; the whole batch stays on the device.
    blocks = memory.profile.timeline.blocks
    weights = sum(block.size_bytes for block in blocks if block.category is Category.PARAMETER)
    assert parts[0] - whole[0] == pytest.approx(weights - 3 * 3 * MIB)
    assert memory.peak(Settings(micro_batches=4), 4) < memory.peak(Settings(), 4)


def test_a_recomputed_module_keeps_its_blocks_away(chain):
    memory = memory_of(chain)
    saved = memory.peak(Settings(), 4) - memory.peak(Settings(checkpoint=("layers.0",)), 4)
    # Two layers that keep 3 MiB for each of 4 samples, and the output between them.
    assert saved == pytest.approx((2 * 3 * 4 + 4) * MIB)


def test_paths_that_are_no_units_change_nothing(chain):
    memory = memory_of(chain)
    assert memory.peak(Settings(checkpoint=("nowhere",), offload=("nowhere",)), 4) == memory.peak(Settings(), 4)


def test_hosted_bytes_are_those_of_what_waits(chain):
    memory = memory_of(chain)
    assert memory.hosted_bytes(Settings(offload=("layers.1.a",)), 4) == pytest.approx(3 * 4 * MIB)


def test_gradients_used_up_in_backward_do_not_add_up():
    # GIVEN parameters that are large beside everything else
    memory = memory_of(Chain([1] * 8, parameter=50, state=100))
    assert memory.peak(Settings(step_in_backward=True), 4) < memory.peak(Settings(), 4)
    assert memory.update_bytes(Settings(step_in_backward=True), 4) == 0


def test_states_elsewhere_or_narrower_save_their_bytes(chain):
    memory = memory_of(chain)
    plain = memory.fixed_bytes(Settings(), 4)
    assert plain - memory.fixed_bytes(Settings(state=OptimizerState.HOST), 4) == pytest.approx(3 * 2 * MIB)
    narrow = plain - memory.fixed_bytes(Settings(state=OptimizerState.EIGHT_BIT), 4)
    assert 0.7 < narrow / (3 * 2 * MIB) < 0.76


def test_kernels_without_temporaries_lower_the_update(chain):
    memory = memory_of(chain)
    plain = memory.update_bytes(Settings(), 4)
    assert plain - memory.update_bytes(Settings(kernels=OptimizerKernels.FUSED), 4) == pytest.approx(MIB)


def test_shards_divide_what_lasts():
    memory = memory_of(Chain([1] * 8, parameter=10, state=20))
    plain, shared = memory.fixed_bytes(Settings(), 4), memory.fixed_bytes(Settings(num_devices=4), 4)
    # Parameters and states by four, and two units gathered.
    assert plain - shared == pytest.approx(0.75 * 8 * 30 * MIB - 2 * 10 * MIB)


def test_gradients_that_are_zeroed_stay():
    memory = memory_of(Chain([1, 1], parameter=20))
    assert memory.curve(Settings(set_to_none=False), 4)[0] > memory.curve(Settings(), 4)[0]


def holding(path, *held):
    empty = Intervals.of(())
    return UnitMemory(path, empty, Intervals.of(Drop(*span) for span in held), empty, empty, empty, ())


def test_what_two_units_hold_is_held_once():
    # GIVEN two units that hold block 7, the second for longer, and one that holds block 8 alone
    segments = held_segments([holding("a", (7, 10, 20)), holding("b", (7, 10, 30), (8, 0, 5))])

    # THEN the common stretch belongs to both, the rest to the one that holds on
    found = {
        (units, block, start, end)
        for units, held in segments
        for block, start, end in zip(held.block, held.start, held.end, strict=True)
    }
    assert found == {((0, 1), 7, 10, 20), ((1,), 7, 20, 30), ((1,), 8, 0, 5)}

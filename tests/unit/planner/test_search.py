import pytest

from memfit.core.settings import OptimizerKernels, OptimizerState, Settings
from memfit.planner.candidate import possible_parts
from memfit.planner.memory import StepMemory
from memfit.planner.search import ProfiledSearch, Space, Variant, merged, optimizer_ways
from tests.unit.planner.profiles import Chain, speed_of


def variant_of(chain, settings=None, batch_size=8):
    first, larger = chain.profile(batch_size), chain.profile(2 * batch_size)
    return Variant(settings or Settings(), StepMemory(first, larger), speed_of(first, larger))


@pytest.fixture
def space():
    # Operators so small that launching them costs as much as running them: micro-batches are not free.
    return Space((variant_of(Chain([3] * 6, flops=[10**5] * 6)),), (Settings(),), possible_parts(8), 8)


def test_parts_differ_in_the_size_of_the_largest():
    assert possible_parts(8) == (1, 2, 3, 4, 8)
    assert possible_parts(1) == (1,)
    assert possible_parts(None) == (1,)
    sizes = [-(-100 // parts) for parts in possible_parts(100)]
    assert sizes == sorted(set(sizes), reverse=True) and sizes[-1] == 1


def test_with_room_nothing_changes(space):
    found = ProfiledSearch(space).best(1e12)
    assert found.settings == Settings()


@pytest.mark.parametrize("share", [0.9, 0.6, 0.4, 0.25])
def test_what_is_found_stays_within_the_limit(space, share):
    limit = share * space.variants[0].memory.peak(Settings(), 8)
    found = ProfiledSearch(space).best(limit)
    assert found.computed_bytes <= limit


def test_less_memory_never_takes_less_time(space):
    search = ProfiledSearch(space)
    plain = space.variants[0].memory.peak(Settings(), 8)
    times = [search.best(share * plain).seconds for share in (1.0, 0.8, 0.6, 0.4, 0.3)]
    assert times == sorted(times)


def test_the_best_is_no_slower_than_any_single_move(space):
    # GIVEN a limit that micro-batches alone and recomputation alone can meet
    variant = space.variants[0]
    limit = 0.5 * variant.memory.peak(Settings(), 8)
    best = ProfiledSearch(space).best(limit)
    alone = [
        variant.speed.step(Settings(micro_batches=parts), 8)
        for parts in space.parts
        if variant.memory.peak(Settings(micro_batches=parts), 8) <= limit
    ]
    assert alone and best.seconds <= min(alone) * 1.01


def test_nothing_fits_below_the_smallest(space):
    search = ProfiledSearch(space)
    smallest = search.smallest()[0]
    assert search.best(0.9 * smallest.computed_bytes) is None
    assert search.best(1.02 * smallest.computed_bytes) is not None


def test_the_front_falls_in_memory_and_rises_in_time(space):
    front = ProfiledSearch(space).front()
    assert len(front) >= 3
    assert [one.computed_bytes for one in front] == sorted((one.computed_bytes for one in front), reverse=True)
    assert [one.seconds for one in front] == sorted(one.seconds for one in front)


def test_the_same_space_gives_the_same_front(space):
    assert [one.settings for one in ProfiledSearch(space).front()] == [
        one.settings for one in ProfiledSearch(space).front()
    ]


def test_a_step_in_backward_excludes_micro_batches():
    space = Space((variant_of(Chain([3] * 4)),), (Settings(step_in_backward=True),), (1, 2, 4), 8)
    for one in ProfiledSearch(space).front():
        assert one.settings.micro_batches == 1


def test_a_variant_with_less_memory_is_taken_when_needed():
    plain, narrow = variant_of(Chain([4] * 4)), variant_of(Chain([2] * 4), Settings(precision="amp-bf16"))
    space = Space((plain, narrow), (Settings(),), (1,), 8, recompute=False)
    limit = 0.7 * plain.memory.peak(Settings(), 8)
    assert ProfiledSearch(space).best(limit).settings.precision == "amp-bf16"


def test_merging_keeps_what_differs():
    found = merged(Settings(precision="amp-bf16"), Settings(micro_batches=4))
    assert (found.precision, found.micro_batches) == ("amp-bf16", 4)


def test_choices_of_the_optimizer_follow_what_it_can_do():
    everything = frozenset(["fused-optimizer", "foreach-off", "step-in-backward", "8-bit-optimizer", "host-optimizer"])
    features = frozenset(["fusable", "foreach", "steppable", "adam"])
    on_gpu = optimizer_ways(features, everything, on_host=False, has_optimizer=True)
    assert on_gpu[0] == Settings()
    assert Settings(kernels=OptimizerKernels.FUSED) in on_gpu
    assert Settings(state=OptimizerState.HOST) in on_gpu
    on_cpu = optimizer_ways(features, everything, on_host=True, has_optimizer=True)
    assert Settings(state=OptimizerState.HOST) not in on_cpu
    assert optimizer_ways(features, everything, on_host=False, has_optimizer=False) == (Settings(),)
    assert optimizer_ways(frozenset(), everything - {"host-optimizer"}, on_host=False, has_optimizer=True) == (
        Settings(),
    )


def test_what_the_allocator_takes_beyond_is_learned_by_combination(space):
    # GIVEN a limit that the plain step would just meet
    search = ProfiledSearch(space)
    plain = space.variants[0].memory.peak(Settings(), 8)
    assert search.best(plain).settings == Settings()

    # WHEN a proof needs more than was computed
    first = search.best(0.8 * plain)
    search.learn(first, first.computed_bytes + 0.3 * plain)

    # THEN those settings are not offered again, and others that nothing is known of are
    second = search.best(0.8 * plain)
    assert second.settings != first.settings


def test_what_is_expected_holds_for_all(space):
    search = ProfiledSearch(space)
    plain = space.variants[0].memory.peak(Settings(), 8)
    search.expected_beyond_bytes = 0.5 * plain
    assert search.best(plain).computed_bytes <= 0.5 * plain


def test_what_cannot_be_run_is_left_out(space):
    search = ProfiledSearch(space)
    limit = 0.5 * space.variants[0].memory.peak(Settings(), 8)
    seen = []
    for _ in range(6):
        found = search.best(limit)
        if found is None:
            break
        assert found.settings not in seen
        seen.append(found.settings)
        search.exclude(found)
    assert len(seen) > 1


def test_what_changes_training_comes_last():
    chain = Chain([3] * 4, flops=[10**5] * 4)
    plain = variant_of(chain)
    lighter = variant_of(Chain([1] * 4, flops=[10**5] * 4), Settings(lora_rank=8))
    space = Space((plain, lighter), (Settings(),), (1,), 8)
    peak = plain.memory.peak(Settings(), 8)
    assert not ProfiledSearch(space).best(0.8 * peak).settings.lora_rank
    smallest = ProfiledSearch(Space((plain,), (Settings(),), (1,), 8)).smallest()[0].computed_bytes
    assert ProfiledSearch(space).best(0.9 * smallest).settings.lora_rank

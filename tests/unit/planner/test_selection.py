"""The integer programme against every subset there is."""

from itertools import combinations

import pytest

from memfit.core.settings import Settings
from memfit.planner.memory import StepMemory
from memfit.planner.selection import ModuleMoves, Selection
from tests.unit.planner.profiles import Chain, speed_of


def selection_of(chain, **options):
    profile = chain.profile()
    memory, speed = StepMemory(profile), speed_of(profile)
    return Selection(memory, ModuleMoves(memory, speed, 4, **options), Settings(), 4), memory, speed


def antichains(paths):
    """Every set of modules in which none contains another."""
    for count in range(len(paths) + 1):
        for chosen in combinations(paths, count):
            if not any(a != b and b.startswith(a + ".") for a in chosen for b in chosen):
                yield chosen


CHAINS = {
    "equal": Chain([3, 3, 3]),
    "growing": Chain([1, 2, 5]),
    "dear first": Chain([4, 4, 2], flops=[9 * 10**9, 10**9, 10**9]),
    "large outputs": Chain([2, 2, 2], output=3),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("share", [0.9, 0.75, 0.6, 0.5])
def test_the_cheapest_choice_is_that_of_an_exhaustive_search(name, share):
    # GIVEN a chain, and a limit below its peak
    selection, memory, speed = selection_of(CHAINS[name])
    limit = share * memory.peak(Settings(), 4)
    paths = [unit.path for unit in memory.units]

    # WHEN the programme is solved, and every subset tried
    found = selection.cheapest(limit)
    within = [s for s in antichains(paths) if memory.peak(Settings(checkpoint=s), 4) <= limit]

    # THEN both agree on the cost, or that there is no way
    if not within:
        assert found is None
        return
    cost = {s: sum(speed.recomputation(path, 4) for path in s) for s in within}
    assert memory.peak(found, 4) <= limit
    assert sum(speed.recomputation(path, 4) for path in found.checkpoint) == pytest.approx(min(cost.values()), rel=0.01)


@pytest.mark.parametrize("name", CHAINS)
def test_the_smallest_choice_is_that_of_an_exhaustive_search(name):
    selection, memory, _ = selection_of(CHAINS[name])
    paths = [unit.path for unit in memory.units]
    least = min(memory.peak(Settings(checkpoint=s), 4) for s in antichains(paths))
    assert memory.peak(selection.smallest(), 4) == pytest.approx(least, rel=0.01)


def test_nothing_is_chosen_where_the_step_fits():
    selection, memory, _ = selection_of(CHAINS["equal"])
    assert selection.cheapest(memory.peak(Settings(), 4)) == Settings()


def test_the_same_question_has_the_same_answer():
    answers = set()
    for _ in range(3):
        selection, memory, _ = selection_of(Chain([3] * 12))
        answers.add(selection.cheapest(0.6 * memory.peak(Settings(), 4)))
    assert len(answers) == 1 and None not in answers


def test_offloading_is_taken_where_it_is_cheaper():
    # GIVEN layers that are dear to compute and quick to move
    chain = Chain([3, 3, 3], flops=[10**13] * 3)
    selection, memory, _ = selection_of(chain, offload=True)
    found = selection.cheapest(0.6 * memory.peak(Settings(), 4))
    assert found.offload and not found.checkpoint


def test_without_permission_there_is_no_way():
    selection, memory, _ = selection_of(CHAINS["equal"], recompute=False)
    assert selection.cheapest(0.6 * memory.peak(Settings(), 4)) is None


def test_what_recomputing_needs_for_the_moment_counts():
    # GIVEN two blocks, of which the first needs much to be computed again
    chain = Chain([4, 4])
    profile = chain.profile()
    memory, speed = StepMemory(profile), speed_of(profile)
    limit = 0.7 * memory.peak(Settings(), 4)
    plain = Selection(memory, ModuleMoves(memory, speed, 4), Settings(), 4).cheapest(limit)
    dear = chain.with_extra(profile, plain.checkpoint[0], 10**12)
    memory = StepMemory(dear)

    # WHEN the choice is made again
    found = Selection(memory, ModuleMoves(memory, speed_of(dear), 4), Settings(), 4).cheapest(limit)

    # THEN it is another
    assert found is None or plain.checkpoint[0] not in found.checkpoint

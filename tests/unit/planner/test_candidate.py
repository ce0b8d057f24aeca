from hypothesis import given
from hypothesis import strategies as st

from memfit.core.settings import Settings
from memfit.planner.candidate import Candidate, front_of, possible_parts, undominated


def as_it_is(pair):
    return pair


def test_what_is_beaten_in_both_is_dropped():
    assert undominated([(3, 6), (1, 9), (4, 2), (2, 5), (2, 7)], as_it_is) == [(4, 2), (2, 5), (1, 9)]


def test_of_equals_one_is_kept():
    found = [(1, 2.0, "a"), (1, 2.0, "b"), (2, 2.0 * (1 - 1e-12), "c")]

    assert undominated(found, lambda one: one[:2]) == [(1, 2.0, "a")]


def test_one_that_is_wanted_stays_and_beats_nothing_by_it():
    # GIVEN a slow one that is wanted, and one that is faster than it but no faster than a smaller one
    found = [(1, 5), (2, 9), (3, 6), (4, 4)]

    assert undominated(found, as_it_is, lambda one: one == (2, 9)) == [(4, 4), (2, 9), (1, 5)]


def test_of_equals_the_wanted_one_is_kept():
    found = [(1, 5, False), (1, 5, True)]

    assert undominated(found, lambda one: one[:2], lambda one: one[2]) == [(1, 5, True)]


def test_nothing_has_no_front():
    assert undominated([], as_it_is) == []


def test_the_front_of_candidates():
    points = [(10.0, 3.0), (20.0, 2.0), (15.0, 3.5), (30.0, 2.0), (40.0, 1.0)]
    kept = front_of([Candidate(Settings(), memory, seconds) for memory, seconds in points])
    assert [(one.computed_bytes, one.seconds) for one in kept] == [(40.0, 1.0), (20.0, 2.0), (10.0, 3.0)]


@given(st.integers(1, 3000))
def test_counts_begin_with_the_whole_batch_end_with_single_samples_and_have_parts_of_different_sizes(size):
    counts = possible_parts(size)
    parts = [-(-size // count) for count in counts]
    assert counts[0] == 1 and counts[-1] == size
    assert parts == sorted(set(parts), reverse=True)
    # No count is larger than its largest part needs.
    assert all(-(-size // part) == count for part, count in zip(parts, counts, strict=True))


def test_a_batch_without_samples_has_one_part():
    assert possible_parts(None) == (1,)

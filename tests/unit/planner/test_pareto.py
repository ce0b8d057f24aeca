from memfit.planner.pareto import undominated


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

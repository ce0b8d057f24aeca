"""Ranges of parameters, and the points drawn from them."""

import math
import random

import pytest

from memfit.core.errors import BadInput
from memfit.guard.space import Space, described_point, key_of


def test_all_combinations_where_they_are_few_enough():
    space = Space({"a": [1, 2], "b": ["x", "y", "z"]})

    assert space.grid_size == 6
    assert space.points(6, seed=5) == [{"a": a, "b": b} for a in (1, 2) for b in "xyz"]


def test_drawn_points_of_a_grid_come_once():
    space = Space({"a": list(range(10)), "b": list(range(10))})

    points = space.points(60, seed=0)

    assert len({key_of(point) for point in points}) == len(points) == 60


def test_a_space_that_is_used_up_gives_what_there_is():
    space = Space({"a": lambda generator: generator.choice("xy")})

    assert sorted(point["a"] for point in space.points(10, seed=0)) == ["x", "y"]


def test_more_points_begin_with_the_same_ones_and_seeds_differ():
    space = Space({"lr": ("log", 1e-4, 1e-1), "depth": (1, 8), "drop": (0.0, 0.5)})

    assert space.points(20, seed=3)[:7] == space.points(7, seed=3)
    assert space.points(7, seed=4) != space.points(7, seed=3)


def test_ranges_keep_their_ends_and_kinds():
    space = Space({"lr": ("log", 1e-4, 1e-1), "depth": (1, 4), "drop": (0.0, 0.5), "width": ("log", 1, 1000)})

    points = space.points(400, seed=0)

    assert all(1e-4 <= point["lr"] <= 1e-1 and 0 <= point["drop"] <= 0.5 for point in points)
    assert {point["depth"] for point in points} == {1, 2, 3, 4}
    assert all(isinstance(point["width"], int) and 1 <= point["width"] <= 1000 for point in points)
    # Half of a logarithmic range lies below its geometric middle.
    below = sum(point["lr"] < math.sqrt(1e-4 * 1e-1) for point in points)
    assert 150 < below < 250


def test_functions_draw_from_the_generator_they_are_given():
    seen = []
    Space({"a": lambda generator: seen.append(generator) or generator.random()}).points(2, seed=0)

    assert all(isinstance(generator, random.Random) for generator in seen)


def test_values_that_json_lacks_are_named():
    assert described_point({"kind": dict, "names": ("a", None), "worst": math.inf}) == {
        "kind": "builtins.dict",
        "names": ["a", None],
        "worst": "inf",
    }


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "space must be a dictionary"),
        ([("lr", 1)], "space must be a dictionary"),
        ({1: [2]}, "names of parameters must be text, but space has 1"),
        ({"lr": []}, "the list of choices of 'lr' is empty"),
        ({"lr": 0.1}, "'lr' is 0.1, which is none of the forms"),
        ({"lr": (1, 2, 3)}, "'lr' is (1, 2, 3), which is none of the forms"),
        ({"lr": (2, 1)}, "the range of 'lr' must be two numbers, the lower one first, but (2, 1) was given"),
        ({"lr": ("a", 1)}, "the range of 'lr' must be two numbers"),
        ({"lr": (0.0, math.inf)}, "the range of 'lr' must be two numbers"),
        ({"lr": ("log", 0, 1)}, "the range of 'lr' is logarithmic, so that it must begin above 0"),
        ({"model": [object()]}, "has no name that is the same in the next run. Give names"),
    ],
)
def test_bad_spaces_are_refused(space, message):
    with pytest.raises(BadInput) as caught:
        Space(space)
    assert message in str(caught.value)

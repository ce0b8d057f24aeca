import random

import numpy as np
import pytest

from memfit.core.errors import BadInput
from memfit.data.transforms import Transforms, stack


def draw(features):
    return features + np.random.random() + random.random()


def draw_from_generator(features, *, rng):
    return features + rng.random()


def draw_from_both(features, *, rng):
    return features + rng.random() + np.random.random()


@pytest.mark.parametrize("function", [draw, draw_from_generator, draw_from_both])
def test_random_numbers_depend_on_the_sample_alone(function):
    transforms = Transforms(function, None)

    def of(*key):
        return transforms.on_sample(np.zeros(2), None, key)[0][0]

    assert of(0, 0, 5) == of(0, 0, 5)
    assert len({of(0, 0, 5), of(0, 0, 6), of(0, 1, 5), of(1, 0, 5)}) == 4


def test_the_programs_own_random_numbers_are_as_before():
    transforms = Transforms(draw, None)
    np.random.seed(3)
    random.seed(3)
    expected = np.random.random(), random.random()
    np.random.seed(3)
    random.seed(3)

    with transforms.own_randomness():
        transforms.on_sample(np.zeros(2), None, (0, 0, 1))

    assert (np.random.random(), random.random()) == expected


def test_randomness_of_other_libraries_is_seeded_too():
    class Library:
        state = 0

        def save(self):
            return self.state

        def restore(self, state):
            self.state = state

        def seed(self, number):
            self.state = number

    library = Library()
    transforms = Transforms(lambda features: library.state, None, [library])

    with transforms.own_randomness():
        first, _ = transforms.on_sample(0, None, (0, 0, 1))
        second, _ = transforms.on_sample(0, None, (0, 0, 2))

    assert 0 <= first < 2**32
    assert first != second
    assert library.state == 0


def test_labels_are_handed_over_where_they_are_asked_for():
    transforms = Transforms(
        lambda features, label: (features * 2, label + 1), lambda features, label: (label, features)
    )

    assert transforms.on_sample(3, 4, (0, 0, 0)) == (6, 5)
    assert transforms.on_batch(3, 4, (0, 0, 0)) == (4, 3)
    assert Transforms(lambda features: features * 2, None).on_sample(3, 4, (0, 0, 0)) == (6, 4)


def test_functions_that_cant_be_looked_into_get_the_features():
    assert Transforms(abs, None).on_sample(-3, 4, (0, 0, 0)) == (3, 4)


def test_unusable_functions_are_refused():
    with pytest.raises(BadInput, match="transform must be a function, but str 'flip' was given"):
        Transforms("flip", None)
    with pytest.raises(BadInput, match=r"takes 3 arguments \(a, b, c\)"):
        Transforms(lambda a, b, c: a, None)
    with pytest.raises(BadInput, match="has to give back both, but gave int 3"):
        Transforms(lambda features, label: 3, None).on_sample(1, 2, (0, 0, 0))


def test_stacking_names_the_sample_that_differs():
    def name(row):
        return f"image {row}"

    assert stack([1.5, 2.5], name).tolist() == [1.5, 2.5]
    assert stack([[1, 2], [3, 4]], name).shape == (2, 2)
    with pytest.raises(BadInput, match=r"image 0 is \[2, 3\], image 2 is \[3, 2\]. Give a transform"):
        stack([np.zeros((2, 3)), np.zeros((2, 3)), np.zeros((3, 2))], name)
    with pytest.raises(BadInput, match="image 0 became NoneType None, which is no array"):
        stack([None], name)
    with pytest.raises(BadInput, match=r"image 1 became tuple .*, which is no array"):
        stack([np.zeros(2), (np.zeros(2), np.zeros(3))], name)

    class Unusual:
        def __array__(self, *args, **options):
            raise TypeError("no such type in NumPy")

    with pytest.raises(BadInput, match=r"no array \(no such type in NumPy\)\. A transform"):
        stack([Unusual()], name)


def test_stacking_loses_nothing_of_later_samples():
    assert stack([0, 0.5], str).tolist() == [0, 0.5]
    assert stack(["a", "abc"], str).tolist() == ["a", "abc"]
    assert stack([np.uint8(3), np.uint8(4)], str).dtype == np.uint8

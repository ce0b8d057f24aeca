import random
import threading

import numpy as np
import pytest

from memfit.core.errors import BadFile, BadInput
from memfit.data.geometry import Geometry
from memfit.data.order import EpochShare, Order
from memfit.data.reader import Assembly, Transforms, read_epoch, stack
from tests.sources import ArraySource, NamedSamples


def read(source, *, batch_size=4, transform=None, batch_transform=None, epoch=0, limit_bytes=10**6, seed=0):
    geometry = Geometry(source.num_samples, batch_size, 1, source.num_samples, source.num_samples)
    dtypes = [field.dtype for field in source.fields]
    assembly = Assembly(source, dtypes, Transforms(transform, batch_transform), seed, np.dtype("float32"))
    share = EpochShare(0, source.num_samples, batch_size)
    return read_epoch(assembly, Order(geometry, None, seed, epoch), share, epoch=epoch, limit_bytes=limit_bytes)


def test_batches_have_the_form_of_the_fields():
    x, y = np.arange(10.0), np.arange(10)

    assert next(read(ArraySource(x))).shape == (4,)
    features, labels = next(read(ArraySource(x, y, labels=1)))
    assert features.tolist() == labels.tolist()
    both, labels = next(read(ArraySource(x, x + 1, y, labels=1)))
    assert (both["x1"] - both["x"]).tolist() == [1] * 4
    first, rest = next(read(ArraySource(x, y, y, labels=2)))
    assert rest["x1"].tolist() == rest["x2"].tolist() == first.tolist()


def test_transforms_see_each_sample_with_its_own_numbers():
    # GIVEN a transform that adds a random number
    def noisy(features, *, rng):
        return features + rng.random()

    source = ArraySource(np.zeros((20, 2)), np.arange(20), labels=1)

    def noise(batch_size):
        batches = read(source, batch_size=batch_size, transform=noisy)
        return {int(label): row[0] for features, labels in batches for row, label in zip(features, labels, strict=True)}

    # THEN each sample gets the same number whatever batch it is in, as float32
    assert noise(4) == noise(7)
    assert len(set(noise(4).values())) == 20
    assert all(value.dtype == np.float32 for value in noise(4).values())


def test_batch_transforms_come_last():
    batches = list(read(ArraySource(np.ones(10)), transform=lambda x: x + 1, batch_transform=lambda x: x.sum()))

    assert batches == [8, 8, 4]


def test_samples_are_read_one_by_one_in_order():
    source = NamedSamples(11)
    batches = list(read(source))

    assert sorted(np.concatenate([labels for _, labels in batches]).tolist()) == list(range(11))
    assert batches[0][0].shape == (4, 2, 3)
    assert batches[0][0].dtype == np.uint8
    assert sorted(source.reads) == list(range(11))


def test_only_a_few_samples_are_read_ahead():
    source = NamedSamples(1000)
    before = set(threading.enumerate())
    batches = read(source, batch_size=10, limit_bytes=300)
    next(batches)

    assert len(source.reads) <= 10 + 4
    batches.close()
    assert set(threading.enumerate()) <= before


def test_samples_that_cant_be_read_are_left_out_or_stop_the_epoch():
    batches = list(read(NamedSamples(12, unreadable=[3, 7])))
    assert sorted(np.concatenate([labels for _, labels in batches])) == [0, 1, 2, 4, 5, 6, 8, 9, 10, 11]
    with pytest.raises(BadFile, match=r"folder/3.png can't be read"):
        list(read(NamedSamples(12, unreadable=[3], fails=True)))
    with pytest.raises(BadFile, match="no sample of a batch of 4 can be read; the first is folder/"):
        list(read(NamedSamples(4, unreadable=range(4))))


def test_samples_of_different_shapes_need_a_transform():
    source = NamedSamples(8, shapes=lambda number: (2 + number % 2, 3))
    with pytest.raises(BadInput, match=r"differ in shape: folder/\d.png is \[\d, 3\].* Give a transform"):
        list(read(source, batch_size=8))

    images, _ = next(read(source, batch_size=8, transform=lambda image: image[:2]))

    assert images.shape == (8, 2, 3)


def test_nothing_to_read():
    assert list(read(ArraySource(np.zeros((0, 3))))) == []


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

import keras
import numpy as np
import pytest

from memfit.core.errors import BadBatch
from memfit.frameworks.keras.batch import Spec, item_bytes, open_batch, read


def arrays(samples=4):
    return np.zeros((samples, 3), "float32"), np.zeros(samples, "int32")


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("bool", 1), ("int8", 1), ("int64", 8), ("float8_e4m3fn", 1)]
)
def test_numbers_have_the_bytes_that_their_names_say(dtype, size):
    assert item_bytes(dtype) == size


def test_a_batch_is_x_or_x_and_y_or_x_y_and_weights():
    x, y = arrays()

    assert read(x).data == Spec((4, 3), "float32")
    assert read((x, y)).data == read([x, y]).data == (Spec((4, 3), "float32"), Spec((4,), "int32"))
    assert read((x, y, None)).data[2] is None
    assert read((x, y)).size_bytes == 4 * 3 * 4 + 4 * 4
    assert read((x, y)).batch_size == 4


def test_inputs_may_be_nested_and_of_any_library():
    import torch

    x, y = arrays()

    batch = read(({"a": torch.zeros(4, 2), "b": [keras.KerasTensor((4, 5), "int32"), x]}, y))

    assert batch.x == {"a": Spec((4, 2), "float32"), "b": [Spec((4, 5), "int32"), Spec((4, 3), "float32")]}


def test_arrays_of_numpy_become_the_numbers_that_keras_computes_with():
    assert read(np.zeros((2, 3))).data == Spec((2, 3), "float32")
    assert read(np.zeros((2, 3), "int64")).data == Spec((2, 3), "int64")


def test_open_first_dimensions_are_samples():
    assert open_batch(keras.KerasTensor((None, 7))).data == Spec((8, 7), "float32")
    assert open_batch(keras.KerasTensor((None, 7)), 3).data == Spec((3, 7), "float32")


def test_other_sizes_change_the_first_dimension_of_all_arrays():
    batch = open_batch(arrays(), 9)

    assert batch.batch_size == 9
    assert batch.data == (Spec((9, 3), "float32"), Spec((9,), "int32"))
    assert batch.resized(2).batch_size == 2
    assert batch.resized(None) is batch


def test_a_function_makes_batches_of_any_size():
    asked = []

    def make(size):
        asked.append(size)
        return arrays(2 * size)

    batch = open_batch(make, 3)

    assert (batch.batch_size, batch.data[0].shape) == (3, (6, 3))
    assert batch.resized(5).data[0].shape == (10, 3)
    assert batch.resized(5).resized(6).data[0].shape == (12, 3)
    assert asked == [3, 5, 5, 6]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (None, r"a batch is missing: give what one step works on, memfit.estimate\(model, batch=\(x, y\)\)"),
        ((), "a batch is x, .x, y. or .x, y, sample_weight., but 0 values were given"),
        (arrays() + arrays(), "but 4 values were given. Put several inputs into one list"),
        (([1.0, 2.0], None), "x of the batch holds 1.0, a float, where arrays, tensors or shapes are expected"),
        ((None, None), "the batch holds no array"),
        (np.zeros((0, 3)), r"an empty array of shape \(0, 3\)"),
        ((np.zeros((4, 3)), np.zeros(5)), r"disagree in their number of samples: their shapes are \(4, 3\), \(5,\)"),
        (lambda n: None, "a batch is missing"),
    ],
)
def test_what_is_no_batch_is_refused(given, text):
    with pytest.raises(BadBatch, match=text):
        open_batch(given)


def test_dimensions_that_could_be_anything_are_refused():
    with pytest.raises(BadBatch, match=r"x of the batch has the shape \(4, None\), whose None could be any size"):
        read(keras.KerasTensor((4, None)))


def test_a_batch_without_samples_has_no_other_size():
    batch = read(np.float32(1.0))

    assert batch.batch_size is None
    with pytest.raises(BadBatch, match="share no first dimension, so no batch size can be set"):
        batch.resized(4)


def test_a_batch_size_is_at_least_one():
    with pytest.raises(BadBatch, match="a batch size must be at least 1, but 0 was given"):
        open_batch(arrays(), 0)


def test_a_training_step_of_its_own_takes_any_form():
    batch = ((np.zeros((12, 3)), np.zeros(12)), (np.zeros((4, 3)), np.zeros(4)), np.zeros(2), np.zeros(2))
    with pytest.raises(BadBatch):
        read(batch)

    found = read(batch, any_form=True)

    assert found.batch_size is None
    assert [spec.shape[0] for spec in found.specs()] == [12, 12, 4, 4, 2, 2]

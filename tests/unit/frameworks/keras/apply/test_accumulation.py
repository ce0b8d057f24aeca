import keras
import numpy as np
import pytest

from memfit.core.errors import BadBatch
from memfit.core.settings import Settings
from memfit.frameworks.keras.apply.accumulation import check_first_dimensions, part_size, splits


def test_settings_ask_for_parts_by_number_or_by_size():
    assert not splits(Settings())
    assert splits(Settings(micro_batches=2))
    assert splits(Settings(micro_batch_size=8))


@pytest.mark.parametrize(("parts", "samples", "size"), [(3, 10, 4), (3, 9, 3), (20, 5, 1), (2, 1, 1)])
def test_as_many_parts_as_asked_for_or_one_for_each_sample(parts, samples, size):
    assert part_size(Settings(micro_batches=parts), samples) == size


def test_the_size_of_a_part_holds_whatever_the_batch():
    assert part_size(Settings(micro_batches=2, micro_batch_size=3), 100) == 3


def test_arrays_of_a_batch_must_agree():
    x = {"a": np.zeros((4, 2)), "b": keras.KerasTensor((None, 3))}
    assert check_first_dimensions((x, np.zeros(4), None)) == 4
    assert check_first_dimensions((keras.KerasTensor((None, 3)), None, None)) is None
    with pytest.raises(BadBatch, match=r"shapes \(4, 2\), \(5,\). Give arrays that all have one row for each sample"):
        check_first_dimensions((x, np.zeros(5), None))
    with pytest.raises(BadBatch, match="a number without dimensions"):
        check_first_dimensions((x, np.float64(1), None))

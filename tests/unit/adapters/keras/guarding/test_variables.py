"""The variables of a model, by group, to disk and back."""

import pytest

from memfit.adapters.keras.guarding import variables
from memfit.core.guarding import BadCheckpoint

keras = pytest.importorskip("keras")
from tests.unit.adapters.keras.guarding.models import build, data  # noqa: E402


def trained(*layers):
    model = build(*layers)
    model.fit(*data(), epochs=1, verbose=0)
    return model


def numbers(model):
    return [variables.as_array(one.value).tolist() for group in variables.grouped(model).values() for one in group]


def test_all_that_a_step_changes_is_in_a_group(tmp_path):
    one, other = trained(), build()
    assert not variables.is_built(other)
    other._symbolic_build(data_batch=data())
    assert variables.is_built(other)
    assert [len(group) for group in variables.grouped(one).values()] == [6, 2, 14, 4]
    assert len(variables.small(one)) == 6
    assert numbers(one) != numbers(other)

    variables.write(tmp_path / "x", one, None)
    variables.read(tmp_path / "x", other)

    assert numbers(one) == numbers(other)


def test_a_file_of_another_model_is_refused(tmp_path):
    one = trained()
    variables.write(tmp_path / "x", one, None)

    with pytest.raises(BadCheckpoint, match=r"it has 6 trainable variables, and 'sequential.*' has 4"):
        variables.read(tmp_path / "x", trained(keras.layers.Dropout(0.5)))
    with pytest.raises(BadCheckpoint, match=r"is stored\. Give another folder"):
        wider = keras.layers.BatchNormalization(dtype="float64")
        variables.read(tmp_path / "x", trained(wider))


def test_sizes():
    model = trained()

    assert variables.size_bytes(model.trainable_variables) == 4 * (24 + 6 + 6 + 6 + 12 + 2)

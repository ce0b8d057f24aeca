"""The variables of a model, by group, to disk and back."""

import pytest

from memfit.core.guarding import BadCheckpoint
from memfit.frameworks.keras.guard import variables

keras = pytest.importorskip("keras")
from tests.unit.frameworks.keras.guard.models import as_array, build, data  # noqa: E402


def trained(*layers):
    model = build(*layers)
    model.fit(*data(), epochs=1, verbose=0)
    return model


def numbers(model):
    return [as_array(one.value).tolist() for group in variables.grouped(model).values() for one in group]


def test_all_that_a_step_changes_is_in_a_group(tmp_path):
    one, other = trained(), build()
    assert not variables.is_built(other)
    other._symbolic_build(data_batch=data())
    assert variables.is_built(other)
    assert [len(group) for group in variables.grouped(one).values()] == [6, 2, 14, 4]
    assert numbers(one) != numbers(other)

    variables.write(tmp_path / "x", one, None)
    variables.read(tmp_path / "x", other)

    assert numbers(one) == numbers(other)


def test_further_optimizers_belong_to_what_a_step_changes():
    one = trained()
    one.second_optimizer = keras.optimizers.SGD(momentum=0.9)
    assert not variables.is_built(one)
    one.second_optimizer.build(one.trainable_variables)

    assert variables.is_built(one)
    held = {id(variable) for variable in variables.grouped(one)[variables.OPTIMIZER]}
    assert held >= {id(variable) for variable in one.second_optimizer.variables}


def test_a_file_of_another_model_is_refused(tmp_path):
    one = trained()
    variables.write(tmp_path / "x", one, None)

    with pytest.raises(BadCheckpoint, match=r"it has 6 trainable variables, and 'sequential.*' has 4"):
        variables.read(tmp_path / "x", trained(keras.layers.Dropout(0.5)))
    with pytest.raises(BadCheckpoint, match=r"is stored\. Give another folder"):
        wider = keras.layers.BatchNormalization(dtype="float64")
        variables.read(tmp_path / "x", trained(wider))


def test_types_that_numpy_lacks_come_back(tmp_path):
    class Narrow(keras.Model):
        def __init__(self, value):
            super().__init__()
            for dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "bool"):
                self.add_weight(shape=(3, 2), dtype=dtype, initializer=value, trainable=False, name=dtype)

    def values(model):
        return [float(keras.ops.sum(keras.ops.cast(one.value, "float32"))) for one in model.non_trainable_variables]

    one, other = Narrow("ones"), Narrow("zeros")
    for model in (one, other):
        model.compile("sgd", "mse")
    variables.write(tmp_path / "x", one, None)
    variables.read(tmp_path / "x", other)

    assert values(one) == values(other) == [6.0] * 4

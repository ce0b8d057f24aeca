"""Which layers get adapters and what is refused; training on all backends is in integration/test_keras_moves.py."""

import keras
import numpy as np
import pytest
from keras import layers

from memfit.core.errors import BadInput, BadModel
from memfit.core.settings import Settings
from memfit.frameworks.keras.apply import low_rank

# Keras's variables on PyTorch, as NumPy 2 sees them.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


def made(**options):
    keras.utils.set_random_seed(0)
    inputs = layers.Input((6,), dtype="int32")
    x = layers.Embedding(9, 4, name="embedding")(inputs)
    x = layers.Conv1D(4, 3, name="convolution")(x)
    x = layers.Dense(4, name="dense", **options)(x)
    model = keras.Model(inputs, layers.Dense(2, name="head")(layers.GlobalAveragePooling1D()(x)))
    model.compile("adam", "mse")
    return model


X = np.arange(12).reshape(2, 6) % 9
Y = np.ones((2, 2), "float32")


@pytest.mark.parametrize("quantized", [False, True])
def test_adapters_are_trained_alone_and_added_to_the_weights_in_the_end(quantized):
    model = made()
    model.train_on_batch(X, Y)
    before, optimizer = model.get_weights(), model.optimizer
    variables, trained = list(model.variables), list(model.trainable_variables)
    undo = low_rank.apply(Settings(lora_rank=2, quantized_base=quantized), model)
    names = {variable.path for variable in model.trainable_variables}
    assert len(names) == 6
    assert all("/lora_" in name and "head" not in name for name in names)
    for _ in range(3):
        model.train_on_batch(X, Y)
    learned = keras.ops.convert_to_numpy(model(X))
    undo()
    assert [id(v) for v in model.variables] == [id(v) for v in variables]
    assert [id(v) for v in model.trainable_variables] == [id(v) for v in trained]
    assert model.optimizer is optimizer
    assert np.abs(learned - keras.ops.convert_to_numpy(model(X))).max() < (0.1 if quantized else 1e-6)
    same = [np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True)]
    # Weights have learned; biases and the head were frozen.
    assert [variable.path for variable, is_same in zip(variables, same, strict=True) if not is_same] == [
        "embedding/embeddings",
        "convolution/kernel",
        "dense/kernel",
    ]
    model.train_on_batch(X, Y)
    assert int(optimizer.iterations) == 2


def test_without_training_the_weights_come_back_to_the_bit():
    model = made()
    before = model.get_weights()
    low_rank.apply(Settings(lora_rank=2, quantized_base=True), model)()
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
    assert not hasattr(model.get_layer("dense"), "lora_kernel_a")
    assert model.get_layer("dense").dtype_policy.name == "float32"


def test_functions_of_evaluation_are_made_anew():
    model = made()
    model.predict(X, verbose=0)
    model.evaluate(X, Y, verbose=0)
    undo = low_rank.apply(Settings(lora_rank=2), model)
    assert model.predict_function is model.test_function is None
    model.predict(X, verbose=0)
    undo()
    assert model.predict_function is None


def test_an_optimizer_of_another_compile_stays():
    model = made()
    undo = low_rank.apply(Settings(lora_rank=2), model)
    model.compile("sgd", "mse")
    own = model.optimizer
    undo()
    assert model.optimizer is own


def test_layers_with_constraints_get_none():
    model = made(kernel_constraint="non_neg")
    low_rank.apply(Settings(lora_rank=2), model)
    assert not any(variable.path.startswith("dense/") for variable in model.trainable_variables)


def test_what_is_refused():
    with pytest.raises(BadInput, match="must be at least 1, or 0 for none, but -1 was given"):
        low_rank.apply(Settings(lora_rank=-1), made())
    with pytest.raises(BadInput, match="int8 base weights can't be trained: they need adapters"):
        low_rank.apply(Settings(quantized_base=True), made())
    head = keras.Sequential([layers.Input((4,)), layers.Dense(2)], name="head")
    with pytest.raises(BadModel, match="'head' has no layers that Keras has adapters for besides"):
        low_rank.apply(Settings(lora_rank=2), head)
    low_rank.apply(Settings(), head)()


def test_words():
    assert low_rank.difference(Settings()) == ""
    assert "only adapters of rank 4 are trained, and the optimizer starts anew" in low_rank.difference(
        Settings(lora_rank=4)
    )
    assert "int8" in low_rank.difference(Settings(lora_rank=4, quantized_base=True))

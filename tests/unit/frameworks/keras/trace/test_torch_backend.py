import gc
from itertools import accumulate

import keras
import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from memfit.catalogue import find_device
from memfit.core.errors import StepFailed
from memfit.core.job import Job
from memfit.core.settings import Settings
from memfit.core.timeline import Category, Phase
from memfit.frameworks.keras.batch import read
from memfit.frameworks.keras.trace import job as jobs
from memfit.frameworks.keras.trace.job import OpenModel

pytestmark = pytest.mark.skipif(keras.backend.backend() != "torch", reason="Keras runs on another backend here")

layers = keras.layers
CPU = find_device("cpu")


def convolutional():
    model = keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            layers.Conv2D(8, 3, padding="same", activation="relu", name="conv"),
            layers.BatchNormalization(name="norm"),
            layers.MaxPooling2D(name="pool"),
            layers.Flatten(),
            layers.Dropout(0.5, name="drop"),
            layers.Dense(10, activation="softmax", name="head"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model, (np.zeros((8, 16, 16, 3), "float32"), np.zeros(8, "int32"))


def recurrent():
    model = keras.Sequential([keras.Input((12, 8)), layers.LSTM(16, name="lstm"), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
    return model, (np.zeros((4, 12, 8), "float32"), np.zeros((4, 1), "float32"))


def attentive():
    tokens = keras.Input((10,), dtype="int32")
    x = layers.Embedding(50, 16, name="embed")(tokens)
    x = layers.LayerNormalization(name="norm")(x + layers.MultiHeadAttention(2, 8, name="attend")(x, x))
    model = keras.Model(tokens, layers.Dense(50, name="head")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(use_ema=True, clipnorm=1.0), loss)
    return model, (np.zeros((4, 10), "int32"), np.zeros((4, 10), "int32"), np.ones((4, 10), "float32"))


def traced(made, device=CPU, **options):
    model, batch = made
    options = {"training": True, **options}
    return jobs.traced(model, read(batch), device, **options)


def measured(model, batch):
    """The greatest sum of live bytes in two real steps."""
    data = keras.tree.map_structure(lambda array: torch.from_numpy(array.copy()), batch)
    model._symbolic_build(data_batch=data)
    model.train()
    gc.collect()
    held = [variable.value for variable in (*model.variables, *model.optimizer.variables)]
    baseline = sum(tensor.untyped_storage().nbytes() for tensor in (*held, *data))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        for _ in range(2):
            model.train_step(data)
            gc.collect()
    changes = []
    waiting = list(watched.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.name == "[memory]":
            changes.append((event.start_time_ns, event.typed[1].alloc_size))
    return baseline + max(accumulate(change for _, change in sorted(changes, key=lambda row: row[0])))


@pytest.mark.parametrize("make", [convolutional, recurrent, attentive])
def test_the_peak_is_the_measured_one(make):
    model, batch = make()

    predicted = traced((model, batch)).timeline.peak()[1]

    assert predicted == pytest.approx(measured(model, batch), rel=0.01)


def test_the_model_is_left_as_it_was():
    model, batch = convolutional()
    tensors = [variable.value for variable in model.variables]
    values = [tensor.detach().clone() for tensor in tensors]
    attributes = dict(vars(model))

    traced((model, batch))

    assert all(variable.value is tensor for variable, tensor in zip(model.variables, tensors, strict=True))
    assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, values, strict=True))
    assert not model.optimizer.built
    assert all(parameter.grad is None for parameter in model.parameters())
    assert vars(model) == attributes
    assert model.train_function is None


def test_blocks_have_layers_phases_and_categories():
    blocks = traced(convolutional()).timeline.blocks

    assert {block.phase for block in blocks} == set(Phase)
    assert {"conv", "norm", "pool", "drop", "head"} <= {block.module for block in blocks}
    kept = {block.module for block in blocks if block.category is Category.ACTIVATION}
    assert {"conv", "norm", "head"} <= kept
    gradients = [block for block in blocks if block.category is Category.GRADIENT]
    assert {block.module for block in gradients} == {"conv", "norm", "head"}
    updates = {block.module for block in blocks if block.phase is Phase.OPTIMIZER}
    assert "(optimizer)" in updates
    # No line of the user's runs in a step of Keras's own layers.
    assert {block.source for block in blocks} == {""}


class Custom(keras.Model):
    def train_step(self, data):
        x, y = data
        loss = ((self(x, training=True) - y) ** 2).mean()
        self.zero_grad()
        loss.backward()
        gradients = [variable.value.grad for variable in self.trainable_weights]
        with torch.no_grad():
            self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


def test_a_training_step_of_the_users_own_is_traced_with_its_lines():
    inputs = keras.Input((8,))
    model = Custom(inputs, layers.Dense(4, name="dense")(inputs))
    model.compile("sgd")

    found = traced((model, (np.zeros((2, 8), "float32"), np.zeros((2, 4), "float32"))))

    assert found.state_bytes[Category.PARAMETER] == 4 * (8 * 4 + 4)
    assert any("test_torch_backend.py:" in block.source for block in found.timeline.blocks)


def test_a_step_that_fails_is_told_with_its_line():
    class Broken(Custom):
        def train_step(self, data):
            return self.nothing

    inputs = keras.Input((8,))
    model = Broken(inputs, layers.Dense(4)(inputs))
    model.compile("sgd")

    with pytest.raises(StepFailed, match=r"failed in its training step at .*test_torch_backend.py:\d+ in train_step"):
        traced((model, (np.zeros((2, 8), "float32"), np.zeros((2, 4), "float32"))))
    assert not model.optimizer.built


def test_a_gpu_takes_what_its_kernels_take():
    found = traced(convolutional(), find_device("t4"))

    assert found.timeline.peak()[1] > 0
    assert any(block.category is Category.WORKSPACE for block in found.timeline.blocks)


def test_predictions_have_neither_gradients_nor_an_optimizer():
    trained, predicted = traced(convolutional()), traced(convolutional(), training=False)

    assert predicted.timeline.peak()[1] < trained.timeline.peak()[1]
    assert set(predicted.state_bytes) == {Category.PARAMETER, Category.BUFFER}
    assert {block.phase for block in predicted.timeline.blocks} == {Phase.SETUP, Phase.FORWARD}


def test_parts_of_a_batch_need_less():
    model, batch = attentive()
    whole = traced((model, batch)).timeline

    parts = traced((model, batch), settings=Settings(micro_batches=4)).timeline

    assert parts.peak()[1] < whole.peak()[1]
    assert sum(mark.phase is Phase.FORWARD for mark in parts.marks) > sum(
        mark.phase is Phase.FORWARD for mark in whole.marks
    )
    assert "train_step" not in vars(model)


def test_a_compiled_step_is_said_to_be_counted_as_it_is():
    model, batch = recurrent()
    model.jit_compile = True

    assert "jit-compile" in {note.code for note in traced((model, batch)).notes}


class Coder(keras.Model):
    """A model without `call`, whose step updates its parts by an optimizer each."""

    def __init__(self, *, built=True):
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)], name="encoder")
        self.decoder = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)], name="decoder")
        self.tracked = keras.metrics.Mean(name="loss")
        self.built = built

    def compile(self, first, second):
        super().compile()
        self.first, self.second = first, second

    @property
    def metrics(self):
        return [self.tracked]

    def train_step(self, data):
        loss = keras.ops.mean(keras.ops.square(self.decoder(self.encoder(data)) - data))
        self.zero_grad()
        loss.backward()
        with torch.no_grad():
            for optimizer, part in ((self.first, self.encoder), (self.second, self.decoder)):
                weights = part.trainable_weights
                optimizer.apply([weight.value.grad for weight in weights], weights)
        self.tracked.update_state(loss)
        return {"loss": self.tracked.result()}


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("batch", [np.zeros((16, 8), "float32"), (np.zeros((16, 8), "float32"),)])
def test_a_model_with_its_own_step_and_no_call(built, batch):
    model = Coder(built=built)
    model.compile(keras.optimizers.Adam(), keras.optimizers.SGD(momentum=0.9))

    found = OpenModel(Job(model, None, batch), find_device("cpu")).trace(None)

    encoder, decoder = 4 * (8 * 4 + 4), 4 * (4 * 8 + 8)
    assert found.state_bytes[Category.PARAMETER] == found.state_bytes[Category.GRADIENT] == encoder + decoder
    assert found.state_bytes[Category.OPTIMIZER_STATE] >= 2 * encoder + decoder
    assert not model.first.built
    assert model.built is built


def test_parts_that_nothing_can_build_are_named():
    model = Coder()
    model.head = keras.layers.Dense(2, name="head")
    model.compile(keras.optimizers.Adam(), keras.optimizers.SGD())

    with pytest.raises(StepFailed, match=r"no call\(\).*head"):
        OpenModel(Job(model, None, np.zeros((16, 8), "float32")), find_device("cpu")).trace(None)

"""On PyTorch; equality with plain `fit` on all backends is in integration/test_fit_equality.py."""

import keras
import numpy as np
import torch
from keras import layers

from memfit.core.settings import Settings
from memfit.frameworks.keras.apply.torch_steps import BackendSplitStep


def test_gradients_are_those_of_the_whole_batch_and_applied_once():
    random = np.random.default_rng(0)
    x, y = random.normal(size=(7, 3)).astype("float32"), random.normal(size=(7, 2)).astype("float32")
    seen, sizes, gradients = [], [], []
    inputs = layers.Input((3,))
    model = keras.Model(inputs, layers.Dense(2)(inputs))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    call = model.call
    model.call = lambda *arguments, **keywords: sizes.append(len(arguments[0])) or call(*arguments, **keywords)
    apply = model.optimizer.apply
    model.optimizer.apply = lambda given, variables: (
        gradients.append([g.clone() for g in given]) or apply(given, variables)
    )
    model.train_step((x, y))
    plain = model.train_step
    split = BackendSplitStep(Settings(micro_batch_size=3), model, lambda data: seen.append(data) or plain(data))
    split((x, y))
    assert sizes == [7, 3, 3, 1]
    assert len(gradients) == 2
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*gradients, strict=True))
    split((x[:3], y[:3]))
    assert len(seen) == 1

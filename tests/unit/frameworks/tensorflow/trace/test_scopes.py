"""Layers and phases from the names of operators."""

import pytest

from memfit.core.timeline import Phase
from memfit.frameworks.tensorflow.trace.scopes import Scopes, phase_of


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("sequential_1/conv2d_1/convolution", Phase.FORWARD),
        ("gradient_tape/sequential_1/conv2d_1/convolution/Conv2DBackpropInput", Phase.BACKWARD),
        ("adam/Sub_3", Phase.OPTIMIZER),
        ("adam_1/Sub_3", Phase.OPTIMIZER),
        ("adamant/Sub_3", Phase.FORWARD),
    ],
)
def test_phases_follow_from_scopes(name, phase):
    assert phase_of(name, ["adam"]) is phase


def test_without_an_optimizer_nothing_is_an_update():
    assert phase_of("adam/Sub_3") is Phase.FORWARD


LAYERS = ["conv2d", "conv2d_1", "block", "block.dense"]


@pytest.mark.parametrize(
    ("names", "name", "layer"),
    [
        (["model/conv2d/x", "model/conv2d_1/x"], "model/conv2d_1/x", "conv2d_1"),
        (["model_1/conv2d_1/x", "model_1/conv2d_1_2/x"], "model_1/conv2d_1/x", "conv2d"),
        (["model_1/conv2d_1/x", "model_1/conv2d_1_2/x"], "gradient_tape/model_1/conv2d_1_2/y/x", "conv2d_1"),
        (["model/block_1/dense_1/MatMul"], "model/block_1/dense_1/MatMul", "block.dense"),
        (["model/block_1/add"], "model/block_1/add", "block"),
        (["model/dense/add"], "model/dense/add", ""),
        (["Add"], "Add", ""),
    ],
)
def test_layers_are_found_under_numbered_scopes(names, name, layer):
    assert Scopes(LAYERS, names).module_of(name) == layer


def test_a_sum_of_gradients_is_part_of_the_backward_pass():
    assert phase_of("AddN_3") is Phase.BACKWARD
    assert phase_of("network/AddN_3/inner") is Phase.FORWARD

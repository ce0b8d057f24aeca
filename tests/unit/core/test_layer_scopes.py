import pytest

from memfit.core.layer_scopes import LayerScopes, with_layers
from memfit.core.timeline import Block, Category, Phase, Timeline

LAYERS = ["conv2d", "conv2d_1", "block", "block.dense", "norm"]


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
        ([], "train_step/model/block/while/dense/add", "block.dense"),
        ([], "compute_loss/norm/", "norm"),
    ],
)
def test_layers_are_found_under_scopes(names, name, layer):
    assert LayerScopes(LAYERS, names).module_of(name) == layer


def test_scopes_in_a_timeline_become_layers_and_what_is_known_stays():
    modules = [("(metrics)", Phase.SETUP), ("model.block.dense", Phase.FORWARD), ("(metrics)", Phase.FORWARD)]
    blocks = [Block(4, tick, None, Category.BUFFER, phase, module) for tick, (module, phase) in enumerate(modules)]

    found = with_layers(Timeline(tuple(blocks), 3, ()), LAYERS)

    assert [block.module for block in found.blocks] == ["(metrics)", "block.dense", "(metrics)"]

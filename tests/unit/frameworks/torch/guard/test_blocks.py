"""The repeated blocks of models."""

import pytest
from torch import nn

from benchmarks.guard_cases import Cnn, Transformer
from memfit.frameworks.torch.guard.blocks import blocks


class Staged(nn.Module):
    """Stages of blocks, as in a ResNet."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.stage1 = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()) for _ in range(2)))
        self.stage2 = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()) for _ in range(3)))
        self.head = nn.Linear(4, 2)


def test_layers_of_a_transformer():
    assert blocks(Transformer(0.1)) == ("encoder.layers.0", "encoder.layers.1")


def test_blocks_of_a_convolutional_network():
    assert blocks(Cnn(0.1)) == ("layers.0", "layers.1", "layers.2")
    assert blocks(Staged()) == ("stage1.0", "stage1.1", "stage2.0", "stage2.1", "stage2.2")


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))])
def test_models_without_blocks_have_none(model):
    assert blocks(model) == ()


def test_parts_that_are_not_trained_are_left_out():
    model = Staged()
    model.stage1.requires_grad_(False)

    assert blocks(model) == ("stage2.0", "stage2.1", "stage2.2")


def test_none_is_inside_of_another():
    for model in (Transformer(0.1), Cnn(0.1), Staged(), nn.Transformer(16, 2, 2, 2, 32, batch_first=True)):
        found = blocks(model)
        assert not [(a, b) for a in found for b in found if a != b and b.startswith(f"{a}.")]

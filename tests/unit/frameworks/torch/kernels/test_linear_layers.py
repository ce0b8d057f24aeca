import torch
from torch import nn

from memfit.core.timeline import Phase
from tests.unit.frameworks.torch.builders import forward_blocks, made_in, run, sizes


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x):
        return self.layer(x)


def outputs(batch, loss=lambda model, x: model(x).sum()):
    """Blocks of the forward pass that are as large as the layer's output."""
    traced = run(Layer(), batch, loss=loss)
    return [b.op for b in forward_blocks(traced) if b.size_bytes == 4 * 7 * 5 * 4], traced


def test_rows_are_flattened_and_product_and_bias_are_one():
    assert outputs(torch.empty(4, 7, 6))[0] == ["aten.addmm"]


def test_the_bias_of_other_inputs_is_added_in_place():
    # GIVEN an input whose rows do not lie one after another
    made, traced = outputs(torch.empty(7, 4, 6), lambda model, x: model(x.transpose(0, 1)).sum())

    assert made == ["aten.mm"]
    # THEN the bias has a gradient all the same
    assert 5 * 4 in sizes(made_in(traced, Phase.BACKWARD), "sum")


def test_autocast_casts_and_keeps_weights():
    def loss(model, x):
        with torch.autocast("cuda", torch.float16):
            return (model(x.transpose(0, 1)) + model(x.transpose(0, 1))).float().sum()

    traced = run(Layer(), torch.empty(7, 4, 6), loss=loss)

    # THEN weight and bias are cast once, the input twice
    cast = [b.size_bytes for b in forward_blocks(traced) if b.op == "aten._to_copy"]
    assert (cast.count(6 * 5 * 2), cast.count(5 * 2), cast.count(4 * 7 * 6 * 2)) == (1, 1, 2)

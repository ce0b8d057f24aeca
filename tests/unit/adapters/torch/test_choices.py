import pytest
import torch
from torch import nn

from memfit.core.timeline import Category
from tests.unit.adapters.torch.builders import AMPERE, HOST, forward_blocks, kept_bytes, run, sizes
from tests.unit.adapters.torch.sessions import codes, made, running

DATA = torch.empty(10, 20)


class Dropped(nn.Module):
    """A layer, then dropout, then a layer that keeps what the dropout let through."""

    def __init__(self, p=0.5, inplace=False):
        super().__init__()
        self.first = nn.Linear(20, 20, bias=False)
        self.drop = nn.Dropout(p, inplace=inplace)
        self.last = nn.Linear(20, 1, bias=False)

    def forward(self, data):
        return self.last(self.drop(self.first(data)))


def last_output(model, batch):
    return model(batch).sum()


OUTPUT = 10 * 20 * 4


@pytest.mark.parametrize(
    ("device", "mask"),
    [(AMPERE, 10 * 20), (HOST, 10 * 20 * 4)],
    ids=["cuda: one byte each", "host: one number each"],
)
def test_dropout_keeps_its_mask_as_the_device_does(device, mask):
    traced = run(Dropped(), DATA, loss=last_output, device=device)

    # Beside the mask: the output of the dropout for the last layer, and the loss.
    assert kept_bytes(traced) == mask + OUTPUT + 4


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_or_all_is_no_native_dropout(p):
    traced = run(Dropped(p), DATA, loss=last_output)

    assert sizes(forward_blocks(traced), "native_dropout") == []


def test_dropout_in_evaluation_mode_keeps_nothing():
    traced = run(Dropped().eval(), DATA, loss=last_output)

    assert kept_bytes(traced) == OUTPUT + 4


def test_dropout_in_place_keeps_a_mask_of_numbers_on_cuda_too():
    # CUDA fuses only the dropout that makes a new tensor.
    traced = run(Dropped(inplace=True), DATA, loss=last_output)

    assert kept_bytes(traced) == OUTPUT + OUTPUT + 4


def test_choices_hold_inside_functions_called_from_cplusplus():
    # GIVEN a layer of the framework that calls dropout from inside another operator
    layer = nn.MultiheadAttention(20, 2, dropout=0.5, batch_first=True)

    def loss(model, batch):
        return model(batch, batch, batch, need_weights=True)[0].sum()

    # WHEN it trains with attention weights asked for, which rules out the fused kernels
    traced = run(layer, torch.empty(4, 10, 20), loss=loss)

    # THEN the dropout of the weights keeps one byte per weight
    masks = [b for b in forward_blocks(traced) if b.op == "aten.native_dropout" and b.size_bytes == 4 * 2 * 10 * 10]
    assert [mask.category for mask in masks] == [Category.ACTIVATION]


STEPS, ROWS, CLASSES, LETTERS = 50, 4, 20, 10
CTC = nn.functional.ctc_loss


def ctc_blocks(input_lengths, target_lengths):
    """(sizes of what a loss of sequences made, the notes)"""
    with running() as session:
        scores = torch.randn(STEPS, ROWS, CLASSES, device="cuda", requires_grad=True)
        targets = torch.ones(ROWS, LETTERS, dtype=torch.int64, device="cuda")
        loss = CTC(scores.log_softmax(-1), targets, input_lengths(), target_lengths())
        loss.backward()
        assert scores.grad.shape == scores.shape
    return [block.size_bytes for block in made(session, op="_ctc_loss")], codes(session)


GIVEN = [STEPS, 30, 20, 10], [8, 6, 4, 2]
WAYS = {
    "on the host": lambda lengths: lambda: torch.tensor(lengths),
    "as numbers": lambda lengths: lambda: tuple(lengths),
    "on the device": lambda lengths: lambda: torch.tensor(lengths, device="cuda"),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_loss_of_sequences_goes_by_their_lengths(way):
    found, noted = ctc_blocks(*(WAYS[way](lengths) for lengths in GIVEN))

    # A number per sequence, and one for each step and each place of the longest target: its letters and the blanks.
    assert sorted(found) == [ROWS * 4, ROWS * STEPS * (2 * 8 + 1) * 4]
    assert noted == []


def test_lengths_that_nobody_knows_are_the_longest_possible():
    def anything():
        return torch.randint(1, 9, (ROWS,), device="cuda")

    found, noted = ctc_blocks(anything, anything)

    assert sorted(found) == [ROWS * 4, ROWS * STEPS * (2 * LETTERS + 1) * 4]
    assert set(noted) == {"stand-in-value"}

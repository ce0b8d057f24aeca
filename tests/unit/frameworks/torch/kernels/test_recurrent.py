import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from memfit.core.timeline import Category, Phase
from memfit.frameworks.torch.kernels.recurrent import reserve_bytes
from tests.unit.frameworks.torch.builders import (
    AMPERE,
    HOST,
    forward_blocks,
    kept_bytes,
    made_in,
    moment,
    notes,
    observe,
    parameter_bytes,
    run,
    sizes,
    total,
)

TIME, BATCH, INPUT, HIDDEN = 5, 3, 8, 16
DATA = torch.empty(TIME, BATCH, INPUT)


def sum_of_outputs(model, batch):
    return model(batch)[0].float().sum()


def cudnn_blocks(traced):
    """Sizes of what the forward operator made: output, last states, reserve."""
    return sizes(forward_blocks(traced), "_cudnn_rnn")


@pytest.mark.parametrize(("mode", "kept"), [(0, 2), (1, 2), (2, 6), (3, 4)])
def test_the_reserve_holds_gates_and_states(mode, kept):
    # Per row and unit: 1, 1, 4 or 3 gates, the output, and for an LSTM the cell.
    assert reserve_bytes(mode, rows=10, hidden=16, num_layers=1, directions=2, element_size=4) == 2 * 10 * 16 * kept * 4


def test_the_reserve_holds_what_passes_between_layers():
    one, three = (reserve_bytes(3, rows=10, hidden=16, num_layers=n, directions=1, element_size=2) for n in (1, 3))

    assert three == 3 * one + 2 * 10 * 16 * 2


def test_an_lstm_is_one_operator_with_a_reserve():
    traced = run(nn.LSTM(INPUT, HIDDEN), DATA, loss=sum_of_outputs)

    rows = TIME * BATCH
    state = BATCH * HIDDEN * 4
    assert cudnn_blocks(traced) == [rows * HIDDEN * 4, state, state, rows * HIDDEN * 6 * 4]


def test_the_reserve_is_kept_for_the_backward_pass_and_then_freed():
    traced = run(nn.LSTM(INPUT, HIDDEN), DATA, loss=sum_of_outputs)

    reserve = forward_blocks(traced)[-1 - len(sizes(forward_blocks(traced), "sum"))]
    assert reserve.size_bytes == TIME * BATCH * HIDDEN * 6 * 4
    assert reserve.category is Category.ACTIVATION
    assert moment(traced.timeline, Phase.BACKWARD) < reserve.end <= moment(traced.timeline, Phase.OPTIMIZER)


def test_no_reserve_without_training():
    traced = run(nn.LSTM(INPUT, HIDDEN).eval(), DATA, loss=sum_of_outputs, training=False)

    state = BATCH * HIDDEN * 4
    assert cudnn_blocks(traced) == [TIME * BATCH * HIDDEN * 4, state, state]


@pytest.mark.parametrize(
    ("layer", "outputs"),
    [
        (nn.GRU(INPUT, HIDDEN), (TIME * BATCH * HIDDEN, BATCH * HIDDEN, TIME * BATCH * HIDDEN * 4)),
        (nn.RNN(INPUT, HIDDEN), (TIME * BATCH * HIDDEN, BATCH * HIDDEN, TIME * BATCH * HIDDEN * 2)),
        (
            nn.RNN(INPUT, HIDDEN, nonlinearity="relu", bias=False),
            (TIME * BATCH * HIDDEN, BATCH * HIDDEN, TIME * BATCH * HIDDEN * 2),
        ),
        (
            nn.GRU(INPUT, HIDDEN, bidirectional=True),
            (TIME * BATCH * HIDDEN * 2, 2 * BATCH * HIDDEN, 2 * TIME * BATCH * HIDDEN * 4),
        ),
        (
            nn.GRU(INPUT, HIDDEN, num_layers=3, dropout=0.1),
            (TIME * BATCH * HIDDEN, 3 * BATCH * HIDDEN, TIME * BATCH * HIDDEN * (3 * 4 + 2)),
        ),
    ],
    ids=["gru", "rnn", "relu", "bidirectional", "layers"],
)
def test_outputs_states_and_reserve_of_other_layers(layer, outputs):
    traced = run(layer, DATA, loss=sum_of_outputs)

    assert cudnn_blocks(traced) == [count * 4 for count in outputs]


def test_a_projection_shrinks_the_output_but_not_the_cell():
    traced = run(nn.LSTM(INPUT, HIDDEN, proj_size=4), DATA, loss=sum_of_outputs)

    assert cudnn_blocks(traced)[:3] == [TIME * BATCH * 4 * 4, BATCH * 4 * 4, BATCH * HIDDEN * 4]


def test_the_batch_may_come_first():
    layer = nn.LSTM(INPUT, HIDDEN, batch_first=True)
    shapes = []

    def loss(model, batch):
        out, (state, _) = model(batch)
        shapes.append((tuple(out.shape), tuple(state.shape)))
        return out.sum()

    run(layer, torch.empty(BATCH, TIME, INPUT), loss=loss)

    assert shapes[0] == ((BATCH, TIME, HIDDEN), (1, BATCH, HIDDEN))


LAYERS = [
    nn.LSTM(INPUT, HIDDEN),
    nn.LSTM(INPUT, HIDDEN, num_layers=2, bidirectional=True, dropout=0.5),
    nn.LSTM(INPUT, HIDDEN, proj_size=4),
    nn.GRU(INPUT, HIDDEN, bias=False),
    nn.RNN(INPUT, HIDDEN, bidirectional=True),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{type(layer).__name__}{layer.extra_repr()}")
@pytest.mark.parametrize("precision", [None, "amp-fp16"])
@pytest.mark.parametrize("device", [AMPERE, HOST], ids=["cuda", "host"])
def test_a_whole_step_runs(layer, precision, device):
    traced = run(layer, DATA, loss=sum_of_outputs, precision=precision, device=device, optimizer=torch.optim.Adam)

    size = parameter_bytes(layer)
    last = traced.timeline.live_at(traced.timeline.num_ticks - 1)
    assert total(last, Category.OPTIMIZER_STATE) == 2 * size
    # cuDNN's gradients of the weights are views of one flat buffer, which can be no smaller.
    assert total(last, Category.GRADIENT) == size
    assert traced.notes == ()


def test_autocast_casts_weights_and_data():
    layer = nn.LSTM(INPUT, HIDDEN)

    traced = run(layer, DATA, loss=sum_of_outputs, precision="amp-fp16")

    casts = sorted(sizes(forward_blocks(traced), "_to_copy"))
    weights = [p.numel() * 2 for p in layer.parameters()]
    states = [BATCH * HIDDEN * 2] * 2
    # The last one is the test's own cast of the output to float32.
    assert casts == sorted([*weights, DATA.numel() * 2, *states, TIME * BATCH * HIDDEN * 4])
    assert cudnn_blocks(traced)[0] == TIME * BATCH * HIDDEN * 2


def packed_loss(lengths, **options):
    def loss(model, batch):
        out, _ = model(pack_padded_sequence(batch, lengths, **options))
        return pad_packed_sequence(out)[0].sum()

    return loss


def test_a_packed_sequence_holds_no_padding():
    traced = run(nn.LSTM(INPUT, HIDDEN), DATA, loss=packed_loss([5, 4, 2]))

    assert sizes(forward_blocks(traced), "_pack_padded_sequence") == [11 * INPUT * 4]
    assert cudnn_blocks(traced)[0] == 11 * HIDDEN * 4
    assert traced.notes == ()


def test_other_lengths_of_the_same_shapes_give_another_size():
    # Answers are kept by shape; lengths are values.
    run(nn.LSTM(INPUT, HIDDEN), DATA, loss=packed_loss([5, 4, 2]))
    traced = run(nn.LSTM(INPUT, HIDDEN), DATA, loss=packed_loss([5, 1, 1]))

    assert cudnn_blocks(traced)[0] == 7 * HIDDEN * 4


@pytest.mark.parametrize("device", [AMPERE, HOST], ids=["cuda", "host"])
def test_unsorted_packed_sequences_train(device):
    loss = packed_loss(torch.tensor([2, 5, 3]), enforce_sorted=False)

    traced = run(nn.GRU(INPUT, HIDDEN), DATA, loss=loss, device=device)

    assert total(made_in(traced, Phase.BACKWARD), Category.GRADIENT) == parameter_bytes(nn.GRU(INPUT, HIDDEN))


def test_lengths_read_from_the_device_are_taken_to_be_full():
    def loss(model, batch):
        data, lengths = batch
        out, _ = model(pack_padded_sequence(data, lengths.cpu(), enforce_sorted=False))
        return out.data.sum()

    traced = run(nn.LSTM(INPUT, HIDDEN), (DATA, torch.tensor([2, 5, 3])), loss=loss)

    assert cudnn_blocks(traced)[0] == TIME * BATCH * HIDDEN * 4
    assert ("data-dependent-shape", "pack_padded_sequence") in notes(traced)


def test_single_cells_run():
    traced = run(nn.LSTMCell(INPUT, HIDDEN), DATA[0], loss=lambda m, b: m(b)[0].sum())

    assert total(made_in(traced, Phase.BACKWARD), Category.GRADIENT) == parameter_bytes(nn.LSTMCell(INPUT, HIDDEN))


ROWS = torch.empty(10, 20)
OUTPUT = 10 * 20 * 4


def sum_of_output(model, batch):
    return model(batch).sum()


def make_model(dtype=torch.float32):
    return nn.Sequential(nn.Linear(20, 20, bias=False), nn.RMSNorm(20)).to(dtype)


def test_it_is_one_kernel_that_keeps_a_number_per_row():
    traced = run(make_model(), ROWS, loss=sum_of_output)

    made = [b.size_bytes for b in forward_blocks(traced) if b.category is not Category.WORKSPACE]
    assert made == [OUTPUT, OUTPUT, 10 * 4, 4]
    assert sizes(forward_blocks(traced), "_fused_rms_norm") == [OUTPUT, 10 * 4]
    # The norm's input, the scales, and the loss.
    assert kept_bytes(traced) == OUTPUT + 10 * 4 + 4


def test_the_scales_of_half_precision_are_float32():
    traced = run(make_model(torch.float16), ROWS.half(), loss=sum_of_output)

    assert sizes(forward_blocks(traced), "_fused_rms_norm") == [OUTPUT // 2, 10 * 4]


def test_the_backward_pass_is_one_kernel_too():
    traced = run(make_model(), ROWS, loss=sum_of_output)

    made = [b for b in made_in(traced, Phase.BACKWARD) if b.op == "aten._fused_rms_norm_backward"]
    assert [(b.size_bytes, b.category, b.module) for b in made] == [
        (OUTPUT, Category.TEMPORARY, "1"),
        (20 * 4, Category.GRADIENT, "1"),
    ]


def test_a_frozen_weight_gets_no_gradient():
    model = make_model()
    model[1].requires_grad_(False)

    traced = run(model, ROWS, loss=sum_of_output)

    assert total(made_in(traced, Phase.BACKWARD), Category.GRADIENT) == 20 * 20 * 4


def test_no_weight_and_several_dimensions():
    def work(data):
        return F.rms_norm(data, (4, 5)).shape

    shape, traced = observe(work, torch.empty(3, 2, 4, 5))

    assert shape == (3, 2, 4, 5)
    assert sizes(forward_blocks(traced), "_fused_rms_norm") == [120 * 4, 6 * 4]


def test_autocast_makes_it_in_float32():
    def work(data):
        with torch.autocast("cuda"):
            return F.rms_norm(data, (20,)).dtype

    assert observe(work, ROWS.half())[0] is torch.float32


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_weights_of_another_precision_are_not_fused():
    def work(data, weight):
        return F.rms_norm(data, (20,), weight).shape

    shape, traced = observe(work, ROWS.half(), torch.empty(20))

    assert shape == (10, 20)
    assert sizes(forward_blocks(traced), "_fused_rms_norm") == []


def test_the_host_has_no_such_kernel():
    traced = run(make_model(), ROWS, loss=sum_of_output, device=HOST)

    assert sizes(forward_blocks(traced), "_fused_rms_norm") == []
    assert kept_bytes(traced) > OUTPUT

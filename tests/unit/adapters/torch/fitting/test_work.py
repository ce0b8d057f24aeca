"""Figures of single operators, counted by hand."""

import pytest
import torch

from memfit.adapters.torch.fitting.work import WorkLog, flops, moved
from memfit.core.timeline import Phase

aten = torch.ops.aten


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_matrix_product():
    a, b = meta(3, 4), meta(4, 5)
    out = aten.mm.default(a, b)
    assert flops(aten.mm.default, (a, b), {}, out) == 2 * 3 * 4 * 5
    assert moved(aten.mm.default, (a, b), {}, out) == 4 * (12 + 20 + 15)


def test_a_convolution_and_its_gradient():
    data, weight = meta(2, 3, 8, 8), meta(5, 3, 3, 3)
    options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    out = aten.convolution.default(data, weight, None, *options)
    forward = 2 * 2 * 8 * 8 * 5 * 3 * 9
    assert flops(aten.convolution.default, (data, weight, None, *options), {}, out) == forward
    args = (out, data, weight, [0], *options, [True, True, False])
    made = aten.convolution_backward.default(*args)
    assert flops(aten.convolution_backward.default, args, {}, made) == 2 * forward


def test_an_operator_that_only_moves_data_computes_nothing():
    a = meta(6)
    assert flops(aten.relu.default, (a,), {}, meta(6)) == 0
    assert moved(aten.relu.default, (a,), {}, meta(6)) == 48


def test_an_operator_in_place_reads_and_writes():
    a = meta(6)
    assert moved(aten.relu_.default, (a,), {}, a) == 48


def test_what_runs_no_kernel_moves_nothing():
    a = meta(6)
    assert moved(aten.empty_like.default, (a,), {}, meta(6)) == 0
    assert moved(aten.alias_copy.default, (a,), {}, a.view(2, 3)) == 0


def test_an_input_that_is_read_twice_counts_once():
    a = meta(6)
    assert moved(aten.mul.Tensor, (a, a), {}, meta(6)) == 48


def test_an_expanded_input_counts_as_it_lies_in_memory():
    assert moved(aten.mul.Tensor, (meta(1).expand(6), meta(6)), {}, meta(6)) == 4 + 48


def test_a_lookup_reads_the_rows_that_it_returns():
    table, rows = meta(1000, 8), meta(3, dtype=torch.int64)
    out = meta(3, 8)
    assert moved(aten.embedding.default, (table, rows), {}, out) == 2 * out.nbytes + rows.nbytes


def test_updates_of_many_tensors_read_and_write_each():
    parameters, gradients = [meta(2), meta(3)], [meta(2), meta(3)]
    assert moved(aten._foreach_add_.List, (parameters, gradients), {}, None) == 3 * 20


def test_attention_of_the_host():
    query, key = meta(1, 2, 5, 8), meta(1, 2, 7, 8)
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert flops(op, (query, key, key), {}, None) == 2 * 2 * (2 * 5 * 7 * 8)


@pytest.mark.parametrize(("op", "times"), [("mkldnn_rnn_layer", 1), ("mkldnn_rnn_layer_backward", 2)])
def test_a_recurrent_layer_multiplies_its_weights_with_each_time_step(op, times):
    data, inner, outer = meta(7, 2, 8), meta(16, 8), meta(16, 4)
    found = flops(getattr(aten, op).default, (data, inner, outer), {}, None)
    assert found == times * 2 * (16 * 8 + 16 * 4) * 7 * 2


def test_the_log_names_operators_and_leaves_out_idle_ones():
    log = WorkLog()
    a, b = meta(2, 2, dtype=torch.bfloat16), meta(2, 2, dtype=torch.bfloat16)
    log.add("layer", Phase.BACKWARD, aten.mm.default, (a, b), {}, meta(2, 2, dtype=torch.bfloat16))
    log.add("layer", Phase.BACKWARD, aten.empty_like.default, (a,), {}, meta(2, 2))
    (work,) = log.operations
    assert (work.module, work.phase, work.op, work.flops, work.moved_bytes, work.dtype) == (
        "layer",
        Phase.BACKWARD,
        "aten.mm",
        16,
        24,
        "bfloat16",
    )


def test_without_floating_point_inputs_there_is_no_dtype():
    log = WorkLog()
    a = meta(2, dtype=torch.int64)
    log.add("", Phase.FORWARD, aten.add.Tensor, (a, a), {}, meta(2, dtype=torch.int64))
    assert log.operations[0].dtype == ""

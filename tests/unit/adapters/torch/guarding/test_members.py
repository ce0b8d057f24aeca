"""Outputs of members: joined, combined, and checked."""

import pytest
import torch
from torch import nn

from memfit.adapters.torch.guarding.members import (
    batch_size,
    combined_by,
    fingerprint,
    is_model,
    join,
    predict,
    ready,
    shuffles,
    split,
    structure,
)
from memfit.core.errors import BadInput


def combine(how, outputs, precise=False):
    combined = combined_by(how, precise)
    for output in outputs:
        combined.add(0, output)
    return combined.finished(0, len(outputs))


def test_a_pass_has_no_gradients_and_a_member_is_in_evaluation_mode():
    model = ready(nn.Dropout(0.5))

    output = predict(lambda m, batch: {"a": m(batch)}, model, torch.ones(4, requires_grad=True))

    assert torch.equal(output["a"], torch.ones(4))
    assert not output["a"].requires_grad
    assert is_model(model)
    assert not is_model(nn.Dropout)


def test_what_is_no_model_or_no_tensor_is_refused():
    with pytest.raises(BadInput, match=r"is built as int, but a torch\.nn\.Module is needed"):
        ready(5)
    with pytest.raises(BadInput, match="predict must return tensors, but it returned float"):
        predict(lambda m, batch: 0.5, None, None)


def test_parts_are_joined_in_their_nesting():
    batch = {"x": torch.arange(7.0), "y": torch.arange(14).view(7, 2)}
    parts = split(batch, 3)

    joined = join([(part["x"] * 2, {"y": part["y"]}) for part in parts], [batch_size(part) for part in parts])

    assert torch.equal(joined[0], batch["x"] * 2)
    assert torch.equal(joined[1]["y"], batch["y"])


@pytest.mark.parametrize("output", [lambda x: x.sum(), lambda x: x[:1]])
def test_outputs_without_a_row_per_sample_are_not_joined(output):
    with pytest.raises(BadInput, match="so that outputs of parts of a batch can't be joined"):
        join([output(torch.ones(3)), output(torch.ones(2))], [3, 2])


def test_mean_and_sum_are_those_of_the_stack_to_rounding():
    torch.manual_seed(0)
    outputs = [torch.randn(50, 3) for _ in range(7)]
    stacked = torch.stack(outputs)

    assert torch.allclose(combine("mean", outputs), stacked.mean(0), rtol=0, atol=3e-7)
    assert torch.allclose(combine("sum", outputs), stacked.sum(0), rtol=0, atol=2e-6)
    # Added in float64 and rounded once.
    assert torch.equal(combine("mean", outputs, precise=True), stacked.double().mean(0).float())


def test_half_precision_is_added_in_float32():
    outputs = [torch.full((2,), 1.0, dtype=torch.bfloat16)] * 300

    found = combine("mean", outputs)

    # In bfloat16 itself 256 + 1 is 256.
    assert (found.dtype, found.tolist()) == (torch.bfloat16, [1.0, 1.0])


def test_whole_numbers_have_a_mean_and_a_sum():
    outputs = [torch.tensor([1, 2]), torch.tensor([2, 4])]

    assert combine("mean", outputs).tolist() == [1.5, 3.0]
    assert combine("sum", outputs).tolist() == [3, 6]
    assert combine("sum", [torch.tensor([True]), torch.tensor([True])]).tolist() == [2]


def test_the_first_output_is_not_written_to():
    first = torch.ones(2)

    combine("sum", [first, torch.ones(2)])

    assert first.tolist() == [1, 1]


def test_stack_is_exact_and_a_function_gets_it():
    outputs = [(torch.randn(3), torch.randn(2)) for _ in range(4)]

    stacked = combine("stack", outputs)

    assert torch.equal(stacked[0], torch.stack([a for a, _ in outputs]))
    assert torch.equal(combine(lambda s: s[1].amax(0), outputs), stacked[1].amax(0))


def test_votes_of_labels_and_of_scores():
    labels = [torch.tensor(values) for values in ([3, 1, 5], [3, 2, 4], [0, 2, 5], [7, 1, 4])]
    # Two against one and one; ties go to the smallest.
    assert combine("vote", labels).tolist() == [3, 1, 4]
    scores = [nn.functional.one_hot(found, 8).float() for found in labels]
    assert combine("vote", scores).tolist() == [3, 1, 4]
    with pytest.raises(BadInput, match="for combine='vote' predict must return labels"):
        combine("vote", [torch.ones(3)])


@pytest.mark.parametrize("how", ["mean", "stack"])
def test_outputs_that_do_not_go_together_are_refused(how):
    with pytest.raises(BadInput, match=r"batch 0 have the shapes \(2,\) and \(3,\) at \['a'\], and can't be combined"):
        combine(how, [{"a": torch.ones(2)}, {"a": torch.ones(3)}])
    with pytest.raises(BadInput, match=r"have the shapes \(2,\) and None"):
        combine(how, [{"a": torch.ones(2)}, {"b": torch.ones(2)}])


def test_an_unknown_combination_is_refused():
    with pytest.raises(BadInput, match="combine must be one of mean, sum, vote, stack or a function, but 'median'"):
        combined_by("median", False)


def test_batches_are_told_apart_by_values_and_shapes():
    one = {"x": torch.arange(1000.0), "y": torch.tensor([float("nan")])}
    other = {**one, "x": one["x"].flip(0)}

    assert fingerprint(one) == fingerprint({name: value.clone() for name, value in one.items()})
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one["x"]) != fingerprint(one["x"].view(2, 500))


def test_models_that_are_built_alike_are_told():
    assert structure(nn.Linear(2, 3)) == structure(nn.Linear(2, 3))
    assert structure(nn.Linear(2, 3)) != structure(nn.Linear(2, 3).double())
    assert structure(nn.Sequential(nn.ReLU())) != structure(nn.Sequential(nn.GELU()))


def test_a_loader_that_shuffles_is_told():
    data = torch.utils.data.TensorDataset(torch.ones(4))

    assert shuffles(torch.utils.data.DataLoader(data, shuffle=True))
    assert not shuffles(torch.utils.data.DataLoader(data))
    assert not shuffles([1])

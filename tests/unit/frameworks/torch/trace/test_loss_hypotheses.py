import math

import pytest
import torch

from memfit.core.settings import Weighting
from memfit.frameworks.torch.trace.loss_hypotheses import (
    Hypothesis,
    Loss,
    Observation,
    all_hypotheses,
    contrasted,
    shortened,
)

LABELS = torch.tensor([[5, 6, -100, -100], [5, 6, 7, 8], [5, -100, -100, -100], [5, 6, 7, -100]])


def loss(value, weight=None):
    return Loss.read(torch.tensor(value) if weight is None else (torch.tensor(value), weight), torch.float32)


def observed(first, second, whole, batch=None, cut=1):
    batch = torch.zeros(4) if batch is None else batch
    return Observation(batch, cut, 4, loss(first), loss(second), loss(whole))


@pytest.mark.parametrize(
    ("weighting", "whole"),
    [
        (Weighting("samples"), (1 * 2.0 + 3 * 4.0) / 4),
        (Weighting("sum"), 6.0),
        (Weighting("count", ""), (2 * 2.0 + 8 * 4.0) / 10),
        (Weighting("count", "", skipped=1), (1 * 2.0 + 5 * 4.0) / 6),
    ],
)
def test_each_hypothesis_holds_where_it_is_right(weighting, whole):
    hypothesis = Hypothesis(weighting)

    assert hypothesis.holds(observed(2.0, 4.0, whole, LABELS))
    assert not hypothesis.holds(observed(2.0, 4.0, whole + 0.01, LABELS))


def test_weights_that_are_given():
    right = Observation(None, 1, 4, loss(2.0, 3), loss(4.0, 1), loss(2.5, torch.tensor(4.0)))
    wrong = Observation(None, 1, 4, loss(2.0, 3), loss(4.0, 1), loss(2.5, 5))

    assert Hypothesis(Weighting("given")).holds(right)
    assert not Hypothesis(Weighting("given")).holds(wrong)
    assert [hypothesis.weighting.kind for hypothesis in all_hypotheses(right)] == ["given"]


def test_a_part_in_which_nothing_counts_weighs_nothing():
    labels = torch.tensor([[-100, -100], [1, 2], [1, 2], [1, -100]])

    assert Hypothesis(Weighting("count", "")).holds(observed(math.nan, 3.0, 3.0, labels))
    assert not Hypothesis(Weighting("samples")).holds(observed(math.nan, 3.0, 3.0, labels))


def test_equal_parts_tell_nothing():
    mean = Hypothesis(Weighting("samples"))

    assert mean.holds(observed(2.0, 2.0, 2.0))
    assert not mean.is_told_apart(observed(2.0, 2.0, 2.0))
    assert not mean.is_told_apart(observed(2.0, 2.00001, 2.0000075))
    assert mean.is_told_apart(observed(2.0, 2.1, 2.075))


def test_a_sum_is_told_apart_by_its_size():
    assert Hypothesis(Weighting("sum")).is_told_apart(observed(2.0, 2.0, 4.0))
    assert not Hypothesis(Weighting("sum")).is_told_apart(observed(0.0, 0.0, 0.0))


def test_hypotheses_of_a_batch():
    batch = {"image": torch.randn(4, 3), "labels": LABELS, "mask": torch.ones(4, 4), "flag": torch.ones(4).bool()}
    found = [hypothesis.weighting for hypothesis in all_hypotheses(observed(1.0, 2.0, 3.0, batch))]

    assert found[:2] == [Weighting("samples"), Weighting("sum")]
    assert {weighting.tensor for weighting in found[2:]} == {"['labels']", "['mask']", "['flag']"}
    assert Weighting("count", "['labels']", -100, 1) in found
    assert {w.ignored for w in found if w.tensor in ("['mask']", "['flag']")} == {0}
    # Per-sample flags have no positions.
    assert all(w.skipped == 0 for w in found if w.tensor == "['flag']")


def test_values_that_a_type_does_not_have_are_left_out():
    batch = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 2, 3]], dtype=torch.uint8)
    found = [hypothesis.weighting for hypothesis in all_hypotheses(observed(1.0, 2.0, 3.0, batch))]

    assert {255, 0} <= {w.ignored for w in found if w.kind == "count"}
    assert all(w.ignored >= 0 for w in found if w.kind == "count")


def test_shortened_leaves_one_position_and_three():
    batch = (torch.arange(12).view(2, 6), torch.ones(2, 6))

    changed, other = shortened(batch, "[0]", -100)

    assert changed.tolist() == [[0, -100, -100, -100, -100, -100], [6, 7, 8, -100, -100, -100]]
    assert other is batch[1]
    assert batch[0][0, 5] == 5


def test_shortened_counts_from_the_first_that_counts():
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])

    assert shortened(mask, "", 0).tolist() == [[0, 0, 1, 0, 0], [0, 1, 1, 1, 0]]


def test_shortened_maps_lose_whole_rows():
    changed = shortened(torch.ones(2, 4, 3), "", 0)

    assert changed.sum((1, 2)).tolist() == [3, 9]


def test_contrasted_changes_the_first_sample_alone():
    batch = {
        "image": torch.full((3, 2), 0.8),
        "tokens": torch.tensor([[4, 5, 6, 7], [7, 8, 9, 1], [1, 2, 3, 4]]),
        "label": torch.tensor([1, 2, 3]),
        "mask": torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]]),
        "scale": torch.tensor(3.0),
    }
    changed = contrasted(batch)

    assert changed["image"][:, 0].tolist() == pytest.approx([0.4, 0.8, 0.8])
    assert changed["tokens"].tolist() == [[4, 5, 4, 4], [7, 8, 9, 1], [1, 2, 3, 4]]
    assert all(torch.equal(changed[name], batch[name]) for name in ("label", "mask", "scale"))
    assert batch["tokens"][0].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("result", [None, 1.0, torch.ones(2), (torch.ones(1), "much"), (torch.ones(1), torch.ones(3))])
def test_what_is_no_loss(result):
    assert Loss.read(result, torch.float32) is None


def test_narrow_types_may_be_off_by_more():
    narrow = Loss.read(torch.tensor(2.0, dtype=torch.bfloat16), torch.bfloat16)

    assert loss(2.0).rounding < narrow.rounding < 0.1


@pytest.mark.parametrize(
    ("weighting", "text"),
    [
        (Weighting("samples"), "a mean over samples"),
        (Weighting("sum"), "a sum over samples"),
        (Weighting("count", "['labels']"), "a mean over the elements of batch['labels'] that aren't -100"),
        (Weighting("count", "[1]", 0, 1), "batch[1] that aren't 0, its first 1 of each sample left out"),
        (Weighting("given"), "a mean weighted by what the loss function returns"),
    ],
)
def test_hypotheses_in_words(weighting, text):
    assert text in Hypothesis(weighting).describe()

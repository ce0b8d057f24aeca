from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from memfit.core.errors import BadBatch
from memfit.core.settings import Weighting
from memfit.frameworks.torch.apply.micro_batches import places, shares, split, tensor_at


@dataclass
class Record:
    data: torch.Tensor
    note: str = "kept"


class Pair(NamedTuple):
    data: torch.Tensor
    labels: torch.Tensor


ROWS = torch.arange(14).view(7, 2)


@pytest.mark.parametrize(("count", "sizes"), [(1, [7]), (2, [4, 3]), (3, [3, 2, 2]), (7, [1] * 7)])
def test_sizes_differ_by_one_at_most_larger_ones_first(count, sizes):
    parts = split(ROWS, count)

    assert [len(part) for part in parts] == sizes
    assert torch.equal(torch.cat(parts), ROWS)


@pytest.mark.parametrize(
    ("batch", "first"),
    [
        ({"data": ROWS, "more": [ROWS[:, 0]]}, lambda part: part["data"]),
        ((ROWS, {"labels": ROWS}), lambda part: part[1]["labels"]),
        (Pair(ROWS, ROWS), lambda part: part.labels),
        (Record(ROWS), lambda part: part.data),
    ],
    ids=["dictionary", "nesting", "named tuple", "dataclass"],
)
def test_any_nesting_is_split_into_views(batch, first):
    parts = split(batch, 3)

    assert all(type(part) is type(batch) for part in parts)
    assert torch.equal(torch.cat([first(part) for part in parts]), ROWS)
    assert {first(part).untyped_storage().data_ptr() for part in parts} == {ROWS.untyped_storage().data_ptr()}


def test_what_has_no_dimensions_is_in_each_part():
    temperature = torch.tensor(0.5)

    parts = split({"data": ROWS, "temperature": temperature, "name": "x"}, 2)

    assert all(part["temperature"] is temperature and part["name"] == "x" for part in parts)


@pytest.mark.parametrize(
    ("batch", "count", "words"),
    [
        ({"data": ROWS, "class_weights": torch.ones(3), "labels": ROWS}, 2,
         r"the tensor at \['class_weights'\] of shape \(3,\) is 3, that of others is 7.*Give a batch"),
        ((ROWS, [torch.ones(4, 2)]), 2, r"the tensor at \[1\]\[0\] of shape \(4, 2\)"),
        ([torch.ones(3, 8, 8)] * 4, 2, r"a list of samples \(the tensor at \[0\] of shape \(3, 8, 8\)"),
        ((ROWS, torch.eye(7).to_sparse()), 2, r"the tensor at \[1\] of shape \(7, 7\) is sparse"),
        (Pair(ROWS, torch.ones(2, 7)), 2, r"at \[1\] of shape \(2, 7\)"),
        (torch.tensor(1.0), 2, "no tensor with dimensions"),
        (pack_sequence([torch.ones(3), torch.ones(2)]), 2, r"the tensor at \[1\]"),
        (ROWS, 8, "7 samples can't be split into 8 parts"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_named(batch, count, words):
    with pytest.raises(BadBatch, match=words):
        split(batch, count)


def test_places():
    batch = {"labels": ROWS, "more": (ROWS, Record(ROWS))}

    assert [place for place, _ in places(batch)] == ["['labels']", "['more'][0]", "['more'][1].data"]
    assert tensor_at(batch, "['more'][1].data") is ROWS
    assert tensor_at(ROWS, "") is ROWS
    with pytest.raises(BadBatch, match=r"no tensor at \['label'\].*it has \['labels'\], "):
        tensor_at(batch, "['label']")


def weigh(batch, count, weighting):
    return shares(split(batch, count), weighting)


def test_samples_weigh_by_their_number():
    assert weigh(ROWS, 3, Weighting()) == [3 / 7, 2 / 7, 2 / 7]
    assert weigh(ROWS, 1, Weighting()) == [1.0]


@pytest.mark.parametrize("kind", ["sum", "given"])
def test_sums_weigh_one_each(kind):
    assert weigh(ROWS, 3, Weighting(kind)) == [1.0, 1.0, 1.0]


def test_counted_elements_weigh_by_their_number():
    labels = torch.tensor([[5, 1, 2], [5, -100, 4], [-100, -100, -100], [5, 3, -100]])

    assert weigh({"labels": labels}, 2, Weighting("count", "['labels']")) == [5 / 7, 2 / 7]
    # WHEN labels are shifted, the first position of each sample is never predicted
    assert weigh((0, labels), 2, Weighting("count", "[1]", skipped=1)) == [3 / 4, 1 / 4]
    assert weigh({"labels": labels}, 4, Weighting("count", "['labels']"))[2] == 0
    mask = Record(torch.tensor([[1, 1], [1, 0]]))
    assert weigh(mask, 2, Weighting("count", ".data", ignored=0)) == [2 / 3, 1 / 3]


def test_where_nothing_counts_the_parts_weigh_as_samples():
    assert weigh(torch.full((3, 2), -100), 2, Weighting("count")) == [2 / 3, 1 / 3]


def test_shapes_weigh_as_samples():
    assert weigh(torch.empty(3, 2, device="meta"), 2, Weighting("count")) == [2 / 3, 1 / 3]

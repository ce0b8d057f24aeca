import pytest
import torch

from memfit.frameworks.torch.shapes.batch import check_batch, common_first_dimension, may_be_samples, resized


def test_the_first_dimension():
    assert common_first_dimension({"a": torch.empty(4, 2), "b": torch.empty(4)}) == 4
    assert common_first_dimension([torch.empty(4), torch.empty(())]) == 4
    assert common_first_dimension([torch.empty(4), torch.empty(3)]) is None
    assert common_first_dimension(torch.empty(())) is None


TOKENS = [torch.zeros(3, 5, dtype=torch.int64) for _ in range(4)]
IMAGES = [torch.zeros(3, 8, 8) for _ in range(4)]


@pytest.mark.parametrize("num_tensors", [2, 3, 4])
@pytest.mark.parametrize("make", [tuple, list, lambda parts: dict(enumerate(parts))])
def test_fields_of_one_shape_are_no_samples(num_tensors, make):
    fields = TOKENS[:num_tensors]

    assert common_first_dimension(make(fields)) == 3
    assert common_first_dimension((make(fields), torch.zeros(3))) == 3
    assert common_first_dimension({"inputs": make(fields), "label": torch.zeros(3)}) == 3
    assert not may_be_samples(make(fields))
    assert may_be_samples((make(fields), torch.zeros(3))) == (num_tensors > 2 and make in (tuple, list))


@pytest.mark.parametrize("make", [tuple, list])
@pytest.mark.parametrize("num_images", [1, 2, 3])
def test_lists_of_samples_have_no_batch_size(make, num_images):
    targets = make({"boxes": torch.zeros(3, 4), "labels": torch.zeros(3)} for _ in range(num_images))
    images = make(IMAGES[:num_images])

    assert common_first_dimension((images, targets)) is None
    assert common_first_dimension({"images": images, "targets": targets}) is None
    assert common_first_dimension((make(IMAGES), torch.zeros(3))) is None
    assert common_first_dimension(list(IMAGES)) is None


def test_a_batch_is_resized_as_shapes():
    batch = {
        "images": torch.empty(4, 3, 8, 8).to(memory_format=torch.channels_last),
        "labels": torch.zeros(4, dtype=torch.int64),
        "scale": torch.ones(()),
        "grid": torch.empty(8, 4),
        "name": "text",
    }

    made = resized(batch, 4, 6)

    assert {k: tuple(v.shape) for k, v in made.items() if k != "name"} == {
        "images": (6, 3, 8, 8),
        "labels": (6,),
        "scale": (),
        "grid": (8, 4),
    }
    assert made["images"].is_contiguous(memory_format=torch.channels_last)
    assert made["labels"].dtype is torch.int64
    assert made["name"] == "text"


def test_resizing_keeps_what_requires_a_gradient():
    assert resized(torch.empty(4, 2, requires_grad=True), 4, 8).requires_grad


def test_meta_tensors_are_a_batch():
    check_batch(torch.empty(4, 2, device="meta"))

import pytest
import torch

from tests.unit.frameworks.torch.sessions import running

NUM_BOXES, NUM_SAMPLES, NUM_FOREGROUND = 2000, 512, 128


@pytest.fixture
def labels():
    """Labels of boxes that a model has proposed: 0 is background; on the simulated device."""
    with running():
        boxes = torch.rand(NUM_BOXES, 7, device="cuda")
        yield boxes.argmax(0).repeat(300)[:NUM_BOXES] * (boxes.sum(1) > 3)


def draw(positions, most):
    return positions[torch.randperm(positions.numel(), device="cuda")[: min(positions.numel(), most)]]


def as_masks(labels):
    """Samples as torchvision takes them."""
    drawn = [draw(torch.where(labels >= 1)[0], NUM_FOREGROUND)]
    drawn.append(draw(torch.where(labels == 0)[0], NUM_SAMPLES - drawn[0].numel()))
    masks = [torch.zeros_like(labels, dtype=torch.uint8) for _ in drawn]
    for mask, positions in zip(masks, drawn, strict=True):
        mask[positions] = 1
    return torch.where(masks[0] | masks[1])[0]


def as_positions(labels):
    """Samples as Detectron2 takes them; its background has the last label."""
    foreground = draw(((labels != -1) & (labels != 7)).nonzero().unbind(1)[0], NUM_FOREGROUND)
    background = draw((labels == 7).nonzero().unbind(1)[0], NUM_SAMPLES - foreground.numel())
    return torch.cat([foreground, background])


@pytest.mark.parametrize(
    ("sample", "is_foreground"), [(as_masks, lambda x: x > 0), (as_positions, lambda x: (x >= 0) & (x < 7))]
)
def test_a_sampler_limits_what_it_selects(labels, sample, is_foreground):
    sampled = sample(labels)
    assert sampled.shape == (NUM_SAMPLES,)
    assert torch.where(is_foreground(labels[sampled]))[0].shape == (NUM_FOREGROUND,)
    assert torch.rand(NUM_BOXES, 4, device="cuda")[sampled].shape == (NUM_SAMPLES, 4)


def test_masks_of_several_images_add_up(labels):
    masks = []
    for _ in range(2):
        mask = torch.zeros(NUM_BOXES, dtype=torch.bool, device="cuda")
        mask[draw(torch.where(labels >= 1)[0], 100)] = True
        masks.append(mask)
    joined = torch.cat(masks)
    assert torch.where(joined)[0].shape == (200,)
    assert torch.rand(2 * NUM_BOXES, 3, device="cuda")[joined].shape == (200, 3)


def test_what_nothing_limits_is_selected_as_a_whole(labels):
    chosen = labels >= 1
    assert labels[chosen].shape == (NUM_BOXES,)
    assert torch.where(chosen & (labels < 5))[0].shape == (NUM_BOXES,)


def test_a_mask_that_is_true_elsewhere_stays_so(labels):
    # GIVEN a mask that is true at 10 elements, set at up to 100 more
    mask = torch.arange(NUM_BOXES, device="cuda") < 10
    mask[draw(torch.where(labels >= 1)[0], 100)] = True
    assert mask.nonzero().shape == (110, 1)
    # WHEN it is turned round
    # THEN that tells nothing
    assert (~mask).nonzero().shape == (NUM_BOXES, 1)


def test_a_mask_that_is_written_with_anything_is_unknown(labels):
    mask = torch.zeros(NUM_BOXES, dtype=torch.bool, device="cuda")
    mask[draw(torch.where(labels >= 1)[0], 100)] = True
    mask.logical_not_()
    assert mask.nonzero().shape == (NUM_BOXES, 1)


def test_labels_that_were_changed_since_are_unknown(labels):
    sampled = as_masks(labels)
    labels.add_(1)
    assert torch.where(labels[sampled] > 0)[0].shape == (NUM_SAMPLES,)

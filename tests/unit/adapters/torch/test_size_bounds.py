import torch

from memfit.core.estimate import AT_MOST
from memfit.core.timeline import Category
from tests.unit.adapters.torch.sessions import codes, made, running, timeline

ROWS, WIDTH = 1000, 64


def bounded(session):
    """Sizes of the blocks that are upper bounds."""
    return [block.size_bytes for block in timeline(session).blocks if block.at_most]


def test_what_is_computed_from_selected_rows_is_an_upper_bound():
    with running() as session:
        rows = torch.rand(ROWS, WIDTH, device="cuda", requires_grad=True)
        weight = torch.rand(WIDTH, 10, device="cuda", requires_grad=True)
        chosen = rows[rows[:, 0] > 0.5]
        out = torch.relu((chosen @ weight).view(-1))
        out.sum().backward()
        blocks = timeline(session).blocks
    assert codes(session).count("data-dependent-shape") == 1
    sizes = [block.size_bytes for block in blocks if block.at_most and block.category is not Category.WORKSPACE]
    # The rows, the product, its activation, and the gradients of these.
    assert sizes[:3] == [ROWS * WIDTH * 4, ROWS * 10 * 4, ROWS * 10 * 4]
    # Neither what was there before nor the gradient of the weight.
    assert WIDTH * 10 * 4 not in sizes
    assert not made(session, op="rand")[0].at_most


def test_a_peak_of_upper_bounds_is_at_most_and_no_lower_bound():
    with running() as session:
        rows = torch.rand(ROWS, WIDTH, device="cuda")
        chosen = rows[rows[:, 0] > 0.5]
        wide = chosen.repeat(1, 100)
        estimate = session.estimate("test", 0.0, died=False)
        del wide
    assert estimate.is_at_most
    assert AT_MOST in [note.code for note in estimate.notes]
    assert estimate.allocated_peak_bytes > ROWS * WIDTH * 400
    assert estimate.lower_bytes - estimate.context_bytes < 3 * ROWS * WIDTH * 4


def test_what_data_decide_is_no_matter_where_it_is_small():
    with running() as session:
        rows = torch.rand(1000 * ROWS, WIDTH, device="cuda")
        chosen = (rows[:10, 0] > 0.5).nonzero()
        estimate = session.estimate("test", 0.0, died=False)
        del chosen
    assert bounded(session)
    assert not estimate.is_at_most


def test_what_is_joined_or_selected_again_stays_an_upper_bound():
    with running() as session:
        boxes = torch.rand(ROWS, 4, device="cuda")
        kept = [boxes[torch.where(boxes[:, place] > 0.5)[0][:300]] for place in range(2)]
        features = torch.cat(kept) @ torch.rand(4, 9, device="cuda")
        assert features.shape == (600, 9)
    assert 600 * 9 * 4 in bounded(session)

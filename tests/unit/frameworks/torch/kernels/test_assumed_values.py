import pytest
import torch

from memfit.core.estimate import AT_MOST
from memfit.core.timeline import Category
from memfit.frameworks.torch.kernels import assumed_values
from memfit.frameworks.torch.kernels.assumed_values import MADE_UP, HostReads
from tests.unit.frameworks.torch.sessions import codes, made, running, timeline

PATIENCE = assumed_values._PATIENCE


@pytest.fixture
def notes():
    return []


class Program:
    """A program that reads at the line it is told to be at."""

    def __init__(self, notes):
        self.line = "train.py:1"
        self.host_reads = HostReads(lambda: self.line, lambda code, text: notes.append((code, text)))

    def reads(self, stand_in, times):
        """The answers that are none of `stand_in`, each with the number of the reading."""
        found = [(number, self.host_reads.answer(stand_in)) for number in range(1, times + 1)]
        return [(number, answer) for number, answer in found if answer != stand_in]


@pytest.fixture
def program(notes):
    return Program(notes)


@pytest.mark.parametrize(("stand_in", "other"), [(False, True), (True, False), (1, 0), (1.0, 0.0)], ids=str)
def test_who_asks_again_and_again_gets_another_answer(program, notes, stand_in, other):
    # GIVEN a program that waits at one line for another number, without taking a step
    found = program.reads(stand_in, 2 * PATIENCE + 1)

    # THEN it gets one from time to time, of the same type
    assert found == [(PATIENCE, other), (2 * PATIENCE, other)]
    assert type(found[0][1]) is type(stand_in)
    assert notes == [("stand-in-value", f"read 5,000 times within a step, and then given {other!r}")] * 2


def test_a_program_that_takes_steps_does_not_wait(program, notes):
    for _ in range(3):
        assert program.reads(False, PATIENCE - 1) == []
        program.host_reads.step_taken()

    assert notes == []


def test_lines_are_counted_one_by_one(program):
    for line in ("train.py:1", "train.py:2"):
        program.line = line
        assert program.reads(1, PATIENCE - 1) == []


def test_a_softmax_is_read_as_equal_probabilities(program, notes):
    made = torch.empty(3, 4, device="meta")
    program.host_reads.are_probabilities(made)

    copied = program.host_reads.host_copy(made, torch.float64)

    assert torch.equal(copied, torch.full((3, 4), 0.25, dtype=torch.float64))
    # Views of it too.
    assert program.host_reads.host_copy(made[0], torch.float32).sum() == 1
    assert {code for code, _ in notes} == {"stand-in-value"}


def test_a_mask_is_read_as_true_until_the_program_waits_for_another(program):
    made = torch.empty(3, dtype=torch.bool, device="meta")
    copies = [program.host_reads.host_copy(made, torch.bool).tolist() for _ in range(PATIENCE)]
    assert copies[:-1] == [[True] * 3] * (PATIENCE - 1)
    assert copies[-1] == [False] * 3


def test_other_tensors_are_left_to_the_caller(program, notes):
    made, other = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    assert program.host_reads.host_copy(other, torch.float32) is NotImplemented
    program.host_reads.are_probabilities(made)

    assert program.host_reads.host_copy(other, torch.float32) is NotImplemented
    # A single number is no distribution.
    assert program.host_reads.host_copy(made[0], torch.float32) is NotImplemented
    assert notes == []


def test_a_program_that_draws_from_a_softmax_on_the_host():
    with running():
        chances = torch.randn(2, 5, device="cuda").softmax(-1)
        drawn = torch.multinomial(chances.cpu(), 1)
        total = chances.cpu().sum(-1)

    assert drawn.shape == (2, 1)
    assert torch.allclose(total, torch.ones(2))


def test_a_program_that_waits_for_the_device_goes_on():
    with running() as session:
        asked = 0
        # GIVEN a loop that ends when a number is small enough
        while torch.randn(3, device="cuda").sum().item() > 0.5:
            asked += 1
            assert asked < 2 * PATIENCE, "it would never end"

    assert asked == PATIENCE - 1
    assert "and then given 0.0" in " ".join(note.text for note in session.simulation.notes.found.values())


VOCABULARY, END = 2000, 3


@pytest.fixture
def language_model():
    """Gives logits of the next token, on the simulated device."""
    with running() as session:
        weight = torch.randn(VOCABULARY, VOCABULARY, device="cuda")
        yield session, lambda ids: weight[ids]


def start(batch=3, length=4):
    return torch.randint(10, VOCABULARY, (batch, length)).cuda()


def by_sampling(logits):
    return torch.multinomial(logits.softmax(-1), 1)


def by_rank(logits):
    return logits.argmax(-1, keepdim=True)


def by_maximum(logits):
    return torch.max(logits, dim=1)[1].unsqueeze(1)


def by_category(logits):
    return torch.distributions.Categorical(logits=logits).sample().unsqueeze(1)


def among_the_best(logits):
    best, ids = logits.topk(20)
    return ids.gather(-1, torch.multinomial(best.softmax(-1), 1))


def by_nucleus(logits):
    ordered, ids = logits.softmax(-1).sort(descending=True)
    ordered[ordered.cumsum(-1) - ordered > 0.9] = 0
    return ids.gather(-1, torch.multinomial(ordered, 1))


WAYS = [by_sampling, by_rank, by_maximum, by_category, among_the_best, by_nucleus]


@pytest.mark.parametrize("choose", WAYS)
def test_a_text_ends_at_the_limit_of_the_program(language_model, choose):
    # GIVEN a loop that stops where all texts have ended, or at its limit
    session, model = language_model
    ids = start()
    done = torch.zeros(3, dtype=torch.bool, device="cuda")
    with torch.no_grad():
        for _ in range(7):
            token = choose(model(ids[:, -1]))
            ids = torch.cat([ids, token], 1)
            done |= token.squeeze(1) == END
            if done.all():
                break
    # THEN whatever is asked of the texts agrees with their length
    completion = ids[:, 4:]
    is_end = completion == END
    first_end = torch.full((3,), is_end.size(1), device="cuda")
    first_end[is_end.any(dim=1)] = is_end.int().argmax(dim=1)[is_end.any(dim=1)]
    mask = torch.arange(is_end.size(1), device="cuda").expand(3, -1) <= first_end.unsqueeze(1)
    texts = [text[part].tolist() for text, part in zip(completion.cpu(), mask.cpu(), strict=True)]
    assert [len(text) for text in texts] == [7, 7, 7]
    assert all(0 <= token < VOCABULARY for text in texts for token in text)
    assert len({tuple(text) for text in texts}) == 3
    assert is_end.nonzero().shape == (0, 2)
    assert int(mask.sum(1).max()) == 7
    assert MADE_UP in codes(session)


def test_a_loop_without_a_limit_ends(language_model, monkeypatch):
    monkeypatch.setattr(assumed_values, "_PATIENCE", 20)
    _, model = language_model
    token, num_tokens = start(1, 1)[0], 0
    with torch.no_grad():
        while token.item() != END and num_tokens < 100:
            token = model(token).argmax(-1)
            num_tokens += 1
    assert 20 <= num_tokens < 40


def test_a_router_in_training_keeps_its_upper_bound():
    # GIVEN a layer that sends tokens to experts by their scores
    with running() as session:
        scores = torch.randn(16, 8, device="cuda", requires_grad=True)
        chosen = scores.topk(2).indices
        # THEN an expert gets as many tokens as it can
        assert (chosen == 3).nonzero().shape[0] == 32
        assert MADE_UP not in codes(session)


@pytest.mark.parametrize("num_actions", [2, 18])
def test_actions_are_valid_and_vary(num_actions):
    with running():
        policy = torch.zeros(1, num_actions, device="cuda").exp()
        actions = [torch.multinomial(policy + 0 * policy.sin(), 1).item() for _ in range(40)]
    assert set(actions) <= set(range(num_actions))
    assert len(set(actions)) > 1


def test_samples_without_replacement_differ():
    with running():
        weights = torch.rand(4, 6, device="cuda")
        samples = torch.multinomial(weights, 6).tolist()
    assert all(sorted(row) == list(range(6)) for row in samples)


def test_beams_go_on_until_their_limit():
    # GIVEN a search that goes on while it may improve and has not come to its limit
    with running(), torch.no_grad():
        length = 0
        while True:
            length += 1
            scores = torch.randn(2, 4, device="cuda")
            improves = torch.any(scores > scores.mean())
            at_limit = torch.full((2,), length >= 9, device="cuda")
            if not improves & ~torch.all(at_limit):
                break
        assert length == 9


def kept_by_position(numbers, scores):
    return numbers[scores.topk(20)[1]]


def kept_by_selection(numbers, scores):
    return numbers.index_select(0, scores.argsort()[:20])


def kept_by_mask(numbers, scores):
    return numbers[scores > 0]


@pytest.mark.parametrize("keep", [kept_by_position, kept_by_selection, kept_by_mask])
def test_rows_that_are_kept_belong_to_all_samples(keep):
    # GIVEN the sample of each row, and scores that decide which rows stay
    with running():
        weight = torch.nn.Parameter(torch.randn(8, device="cuda"))
        samples = torch.arange(10).repeat_interleave(5).cuda()
        scores = torch.randn(50, 8).cuda() @ weight

        kept = keep(samples, scores)

        # THEN the number of samples is what it was, as pooling by sample needs
        assert int(kept.max()) + 1 == 10
        assert kept.tolist() == sorted(kept.tolist())


def test_other_tables_stay_unknown():
    with running():
        weight = torch.nn.Parameter(torch.randn(8, device="cuda"))
        classes = torch.tensor([0, 3, 1, 2]).cuda()
        chosen = classes[(torch.randn(4, 8).cuda() @ weight).argsort()]

        assert (chosen == 3).nonzero().shape == (4, 1)


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
    assert estimate.certain_bytes - estimate.context_bytes < 3 * ROWS * WIDTH * 4


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

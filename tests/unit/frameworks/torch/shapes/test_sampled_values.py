import pytest
import torch

from memfit.core.estimate import AT_MOST
from memfit.core.timeline import Category
from memfit.frameworks.torch.kernels import host_reads as readings
from memfit.frameworks.torch.shapes.sampled_values import MADE_UP
from tests.unit.frameworks.torch.sessions import codes, made, running, timeline

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
    monkeypatch.setattr(readings, "_PATIENCE", 20)
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

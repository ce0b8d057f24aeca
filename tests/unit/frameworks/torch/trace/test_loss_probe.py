import io
import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

from memfit.core.device import Origin
from memfit.core.settings import Weighting
from memfit.frameworks.torch.trace.loss_hypotheses import HOLLOW
from memfit.frameworks.torch.trace.loss_probe import find_weighting, part_of

SAMPLES, WIDTH, CLASSES, LENGTH, WORDS = 16, 12, 5, 20, 50


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def features():
    return torch.randn(SAMPLES, WIDTH)


def classes(low=0, high=CLASSES):
    return torch.randint(low, high, (SAMPLES,))


def linear():
    return nn.Linear(WIDTH, CLASSES)


def classify(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


class Words(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, WORDS)

    def forward(self, words):
        return self.head(self.dropout(self.embedding(words)))


def words(length=LENGTH):
    return torch.randint(2, WORDS, (SAMPLES, length))


def shortened(tensor, value):
    """Each sample a position longer than the one before, and `value` after that."""
    tensor = tensor.clone()
    for sample in range(SAMPLES):
        tensor[sample, 4 + sample :] = value
    return tensor


def by_word(model, batch):
    return functional.cross_entropy(model(batch["words"]).flatten(0, 1), batch["labels"].flatten())


def next_word(model, batch):
    """As causal language models of transformers shift their labels."""
    logits = model(batch["words"])[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def next_word_padded(model, batch):
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)


def masked(model, batch):
    each = functional.cross_entropy(model(batch["words"]).transpose(1, 2), batch["labels"], reduction="none")
    return (each * batch["mask"]).sum() / batch["mask"].sum()


def masked_by_sample(model, batch):
    each = functional.cross_entropy(model(batch["words"]).transpose(1, 2), batch["labels"], reduction="none")
    return ((each * batch["mask"]).sum(1) / batch["mask"].sum(1)).mean()


def contrast(model, batch):
    left, right = (functional.normalize(model(view), dim=1) for view in batch)
    return functional.cross_entropy(left @ right.T / 0.1, torch.arange(len(left)))


def hardest_triplets(model, batch):
    embedded = model(batch[0])
    distance, same = torch.cdist(embedded, embedded), batch[1][:, None] == batch[1]
    return functional.relu((distance * same).amax(1) - (distance + 1e6 * same).amin(1) + 1).mean()


def with_variance_of_batch(model, batch):
    output = model(batch[0])
    return functional.mse_loss(output, batch[1]) + 0.1 * functional.relu(1 - output.var(0, correction=0)).mean()


def dice(model, batch):
    share = torch.sigmoid(model(batch[0]))
    return 1 - 2 * (share * batch[1]).sum() / (share.sum() + batch[1].sum())


def dice_of_classes(model, batch):
    """Random samples hardly show that it is a ratio of sums over the whole batch."""
    logits = model(batch[0])
    target, share = functional.one_hot(batch[1], CLASSES).movedim(-1, 1), logits.softmax(1)
    overlap = (share * target).sum((0, 2, 3)) / (share + target).sum((0, 2, 3))
    return functional.cross_entropy(logits, batch[1]) + 1 - 2 * overlap.mean()


def pixels():
    return torch.randn(SAMPLES, 3, 32, 32), torch.randint(0, CLASSES, (SAMPLES, 32, 32))


def noisy_images():
    return torch.randn(SAMPLES, 1, 8, 8), (torch.rand(SAMPLES, 1, 8, 8) > torch.rand(SAMPLES, 1, 1, 1)).float()


def void_pixels():
    labels = torch.randint(0, CLASSES, (SAMPLES, 8, 8))
    labels[1, 2:] = labels[4] = 255
    return torch.randn(SAMPLES, 3, 8, 8), labels


def by_pixel(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1], ignore_index=255)


def focus(model, batch):
    """As detectors do: over all anchors, for each that is no background."""
    each = functional.cross_entropy(model(batch[0]).movedim(-1, 1), batch[1], reduction="none")
    return each.sum() / (batch[1] > 0).sum().clamp(min=1)


def anchors():
    labels = torch.randint(1, CLASSES, (SAMPLES, 100)) * (torch.rand(SAMPLES, 100) < 0.1)
    return torch.randn(SAMPLES, 100, WIDTH), labels


def transcribe(model, batch):
    frames = model(batch["frames"]).log_softmax(-1).transpose(0, 1)
    return functional.ctc_loss(frames, batch["words"], batch["num_frames"], batch["num_words"])


def speech():
    return {
        "frames": torch.randn(SAMPLES, 15, WIDTH),
        "words": torch.randint(1, CLASSES, (SAMPLES, 4)),
        "num_frames": torch.full((SAMPLES,), 15),
        "num_words": torch.randint(1, 5, (SAMPLES,)),
    }


def regularised(reduction):
    def loss(model, batch):
        penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
        return functional.mse_loss(model(batch[0]), batch[1], reduction=reduction) + 0.1 * penalty

    return loss


def gradient_penalty(model, batch):
    images = batch.requires_grad_()
    scores = model(images).sum(1)
    (slopes,) = torch.autograd.grad(scores.sum(), images, create_graph=True)
    return scores.mean() + 10 * ((slopes.norm(dim=1) - 1) ** 2).mean()


def denoise(model, batch):
    noise, times = torch.randn(batch.shape), torch.randint(0, 100, (len(batch), 1)) / 100
    return functional.mse_loss(model(batch * (1 - times) + noise * times), noise[:, :CLASSES])


class Recurrent(nn.Module):
    """Dropout inside of a module that is no dropout, along a first dimension that isn't the samples'."""

    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(WIDTH, 8, 2, dropout=0.5)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, sequences):
        return self.head(self.layers(sequences.transpose(0, 1))[0][-1])


class FunctionalDropout(nn.Linear):
    def forward(self, values):
        return super().forward(functional.dropout(values, 0.5, self.training))


DISCRIMINATOR = nn.Linear(CLASSES, 1)


def fool(model, batch):
    scores = DISCRIMINATOR(model(batch))
    return functional.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))


def summed(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def squared(model, batch):
    return functional.mse_loss(model(batch[0]), batch[1])


def with_noise(model, batch):
    output = model(batch)
    return (output + torch.randn_like(output)).square().mean()


def mlp(*inner):
    return nn.Sequential(nn.Linear(WIDTH, 8), *inner, nn.Linear(8, CLASSES))


def used(model):
    model(features())
    return model


def labelled():
    return features(), classes()


def targets():
    return features(), torch.randn(SAMPLES, CLASSES)


def sentences(**changes):
    return {"words": words(), "labels": words(), **changes}


MEAN, SUM = Weighting("samples"), Weighting("sum")

ADDS_UP = {
    "cross entropy": (linear, classify, labelled, MEAN),
    "sum": (linear, summed, labelled, SUM),
    "squares": (linear, squared, targets, MEAN),
    "mean and a constant": (linear, regularised("mean"), targets, MEAN),
    "words, none ignored": (Words, by_word, sentences, Weighting("count", "['labels']")),
    "words, some ignored": (
        Words,
        by_word,
        lambda: sentences(labels=shortened(words(), -100)),
        Weighting("count", "['labels']"),
    ),
    "words, dropout": (
        lambda: Words(0.5),
        by_word,
        lambda: sentences(labels=shortened(words(), -100)),
        Weighting("count", "['labels']"),
    ),
    "next word": (Words, next_word, sentences, Weighting("count", "['labels']", skipped=1)),
    "next word, padded": (
        Words,
        next_word_padded,
        lambda: shortened(words(), 0),
        Weighting("count", "", ignored=0, skipped=1),
    ),
    "next word, padding to come": (Words, next_word_padded, words, Weighting("count", "", ignored=0, skipped=1)),
    "mask of ones": (
        Words,
        masked,
        lambda: sentences(mask=torch.ones(SAMPLES, LENGTH)),
        Weighting("count", "['mask']", ignored=0),
    ),
    "mask": (
        Words,
        masked,
        lambda: sentences(mask=shortened(torch.ones(SAMPLES, LENGTH, dtype=torch.bool), False)),
        Weighting("count", "['mask']", ignored=0),
    ),
    "mask, mean of each sample": (
        Words,
        masked_by_sample,
        lambda: sentences(mask=shortened(torch.ones(SAMPLES, LENGTH), 0)),
        MEAN,
    ),
    "void pixels": (
        lambda: nn.Conv2d(3, CLASSES, 3, padding=1),
        by_pixel,
        void_pixels,
        Weighting("count", "[1]", ignored=255),
    ),
    "objects": (lambda: nn.Linear(WIDTH, CLASSES), focus, anchors, Weighting("count", "[1]", ignored=0)),
    "transcription": (linear, transcribe, speech, MEAN),
    "generator": (linear, fool, features, MEAN),
    "gradient penalty": (lambda: mlp(nn.Tanh()), gradient_penalty, features, MEAN),
    "batch norm": (lambda: mlp(nn.BatchNorm1d(8)), classify, labelled, MEAN),
    "batch norm in use": (lambda: used(mlp(nn.BatchNorm1d(8))), classify, labelled, MEAN),
    "batch norm without statistics": (
        lambda: mlp(nn.BatchNorm1d(8, track_running_stats=False)),
        classify,
        labelled,
        MEAN,
    ),
    "dropout": (lambda: mlp(nn.Dropout(0.5)), classify, labelled, MEAN),
    "functional dropout": (lambda: FunctionalDropout(WIDTH, CLASSES), classify, labelled, MEAN),
    "dropout of recurrent layers": (
        Recurrent,
        classify,
        lambda: (torch.randn(SAMPLES, 7, WIDTH), classes()),
        MEAN,
    ),
    "noise": (linear, with_noise, features, MEAN),
    "diffusion": (linear, denoise, features, MEAN),
    "two samples": (linear, classify, lambda: (features()[:2], classes()[:2]), MEAN),
    "samples alike": (linear, classify, lambda: (torch.ones(SAMPLES, WIDTH), torch.zeros(SAMPLES).long()), MEAN),
    "its own weight": (
        Words,
        lambda model, batch: (by_word(model, batch), (batch["labels"] != -100).sum()),
        lambda: sentences(labels=shortened(words(), -100)),
        Weighting("given"),
    ),
}


@pytest.mark.parametrize("name", ADDS_UP)
def test_how_a_loss_adds_up_is_found(name):
    build, loss, batch, expected = ADDS_UP[name]

    found = find_weighting(build(), loss, batch())

    assert found.weighting == expected, found.reason
    assert found.origin is Origin.MEASURED


# Random or normalised by batch whatever the mode, or weighed by itself.
NOT_REPEATED = {"noise", "diffusion", "batch norm without statistics", "its own weight"}


@pytest.mark.parametrize("name", [name for name in ADDS_UP if name not in NOT_REPEATED])
def test_the_weighting_found_gives_the_loss_of_other_parts(name):
    """What is promised, on parts that the probe has not seen, in evaluation mode where nothing is random."""
    build, loss, make, weighting = ADDS_UP[name]
    model, batch = build().eval(), make()

    count = len(batch["words"]) if isinstance(batch, dict) else len(batch[0]) if isinstance(batch, tuple) else SAMPLES
    half = count // 2
    parts = [part_of(batch, 0, half), part_of(batch, half, count)]
    weights = [_weight(parts[0], weighting, half), _weight(parts[1], weighting, count - half)]
    total = sum(w * loss(model, part).item() for w, part in zip(weights, parts, strict=True))

    expected = loss(model, batch).item()
    assert total / (1 if weighting.kind == "sum" else sum(weights)) == pytest.approx(expected, rel=1e-5)


def _weight(part, weighting, size):
    if weighting.kind == "sum":
        return 1
    if weighting.kind == "samples":
        return size
    counted = {"['labels']": lambda: part["labels"], "['mask']": lambda: part["mask"], "[1]": lambda: part[1]}
    tensor = counted.get(weighting.tensor, lambda: part)()
    return (tensor[:, weighting.skipped :] != weighting.ignored).sum().item()


COMPARES_SAMPLES = "neither the mean nor the sum"

DOES_NOT_ADD_UP = {
    "contrastive": (linear, contrast, lambda: (features(), features()), COMPARES_SAMPLES),
    "hardest triplets": (linear, hardest_triplets, lambda: (features(), classes(0, 2)), COMPARES_SAMPLES),
    "variance of the batch": (linear, with_variance_of_batch, targets, COMPARES_SAMPLES),
    "dice": (lambda: nn.Conv2d(1, 1, 3, padding=1), dice, noisy_images, COMPARES_SAMPLES),
    "dice of classes": (
        lambda: nn.Conv2d(3, CLASSES, 3, padding=1),
        dice_of_classes,
        pixels,
        "not the count of one tensor",
    ),
    "weights of classes": (
        linear,
        lambda model, batch: functional.cross_entropy(
            model(batch[0]), batch[1], weight=torch.tensor([1.0, 2, 3, 4, 5])
        ),
        labelled,
        "weighed by their classes",
    ),
    "sum and a constant": (linear, regularised("sum"), targets, "a sum over samples plus a term of its own"),
    "a wrong weight": (
        Words,
        lambda model, batch: (by_word(model, batch), len(batch["labels"])),
        lambda: sentences(labels=shortened(words(), -100)),
        "check weight",
    ),
}


@pytest.mark.parametrize("name", DOES_NOT_ADD_UP)
def test_a_loss_that_does_not_add_up_is_told(name):
    build, loss, batch, words_of_reason = DOES_NOT_ADD_UP[name]

    found = find_weighting(build(), loss, batch())

    assert found.weighting is None
    assert words_of_reason in found.reason
    assert found.origin is Origin.MEASURED


def paired(model, batch):
    if len(batch) % 2:
        raise ValueError("pairs needed")
    return model(batch).mean()


def mixed_up(model, batch):
    order = torch.randperm(len(batch[0]))
    return functional.cross_entropy(model(0.3 * batch[0] + 0.7 * batch[0][order]), batch[1])


@pytest.mark.parametrize(
    ("build", "loss", "batch", "reason"),
    [
        (linear, classify, lambda: features, "given as a function"),
        (lambda: nn.Linear(WIDTH, CLASSES, device="meta"), classify, labelled, "shapes only"),
        (linear, classify, lambda: (torch.empty(8, WIDTH, device="meta"), classes()[:8]), "shapes only"),
        (lambda: nn.LazyLinear(CLASSES), classify, labelled, "without a shape"),
        (linear, classify, lambda: (features()[:1], classes()[:1]), "1 sample"),
        (linear, classify, lambda: (features(), classes()[:4]), "no first dimension in common"),
        (linear, lambda model, batch: model(batch).sum() * torch.inf, features, "not finite"),
        (linear, lambda model, batch: model(batch).sum() * 0, features, "too much alike"),
        (linear, mixed_up, labelled, "random numbers"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_cannot_be_found_out_is_assumed(build, loss, batch, reason):
    found = find_weighting(build(), loss, batch())

    assert found.weighting == Weighting("samples")
    assert found.origin is Origin.ASSUMED
    assert reason in found.reason
    assert "a mean over samples is assumed" in found.reason


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (paired, "a part of 3 samples (ValueError: pairs needed)"),
        (lambda model, batch: model(batch), "not a scalar"),
    ],
)
def test_a_loss_that_fails_on_a_part_keeps_the_batch_whole(loss, reason):
    found = find_weighting(linear(), loss, features())

    assert found.weighting is None and found.origin is Origin.MEASURED
    assert reason in found.reason and "can't be split" in found.reason


def test_transformers_shift_their_labels():
    transformers = pytest.importorskip("transformers")
    from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators

    define_missing_operators()
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": WORDS, "n_positions": LENGTH}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).train()
    tokens = words()
    batch = {"input_ids": tokens, "labels": shortened(tokens, -100)}

    found = find_weighting(model, lambda model, batch: model(**batch).loss, batch)

    assert found.weighting == Weighting("count", "['labels']", skipped=1)


def test_sixteen_bits_are_no_reason_for_doubt():
    model = mlp(nn.ReLU()).bfloat16()

    def loss(model, batch):
        return functional.cross_entropy(model(batch[0].bfloat16()).float(), batch[1])

    assert find_weighting(model, loss, labelled()).weighting == MEAN


def test_long_sequences_are_cut_and_a_slow_model_is_run_on_two_samples(monkeypatch):
    # GIVEN a model that counts as slow, and sequences longer than needed
    # (what a run adds to a list would be taken back)
    seen = io.StringIO()

    def loss(model, batch):
        print(*batch["words"].shape, file=seen)
        return by_word(model, batch)

    monkeypatch.setattr("memfit.frameworks.torch.trace.loss_probe._SAMPLES_BY_COST", ((0.0, 8), (0.0, 4)))

    # WHEN it is probed
    found = find_weighting(Words(), loss, {"words": words(100), "labels": words(100)})

    # THEN it sees parts of two short samples
    assert found.weighting == Weighting("count", "['labels']")
    assert set(seen.getvalue().splitlines()) == {"1 64", "2 64"}


def test_sequences_that_begin_with_padding_stay_whole():
    labels = words(100)
    labels[:, :70] = -100

    found = find_weighting(Words(), by_word, {"words": words(100), "labels": labels})

    assert found.weighting == Weighting("count", "['labels']")


def test_nothing_of_the_users_is_changed():
    # GIVEN a model with everything a run could change, in use
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES))
    batch = labelled()
    classify(model, batch).backward()
    model[2].eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    values = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    parameters = dict(model.named_parameters())
    given = [tensor.clone() for tensor in batch]
    torch_state, python_state = torch.get_rng_state(), random.getstate()

    # WHEN it is probed with a loss that changes its batch
    def loss(model, batch):
        batch[0].mul_(2).add_(torch.randn(1))
        random.random()
        return classify(model, batch)

    find_weighting(model, loss, batch)

    # THEN everything is as before, down to the objects
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(parameter.grad is gradients[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(parameter.grad, values[name]) for name, parameter in model.named_parameters())
    assert [module.training for module in model] == [True, True, False, True]
    assert all(torch.equal(*pair) for pair in zip(batch, given, strict=True))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


def sizes_of_runs(model, batch):
    """Samples of each run of a loss, in order."""
    seen = io.StringIO()  # a list would be put back

    def loss(model, batch):
        print(len(batch[0]), file=seen)
        return classify(model, batch)

    assert find_weighting(model, loss, batch).weighting == MEAN
    return [int(size) for size in seen.getvalue().split()]


# Slopes of two samples; eight samples more at once, in two parts; and then few samples in 64 bits: so many runs.
CLOSER = 3 + 3 + 6


def test_at_most_eight_samples_are_run_and_then_all_at_once():
    sizes = sizes_of_runs(linear(), labelled())

    assert max(sizes[:-CLOSER]) == 8
    # Nine with samples as they are, up to six to find unlike ones, and three for each value that losses leave out.
    assert len(sizes) <= 9 + 7 + 3 * (len(HOLLOW) + 1) + CLOSER
    assert sorted(sizes[-9:-6]) == [6, 10, SAMPLES]


def test_samples_that_are_unlike_already_are_not_looked_for():
    # Half of the first sample's measurements have a loss far from that of the second.
    scores = nn.Linear(CLASSES, CLASSES, bias=False)
    nn.init.eye_(scores.weight)
    labels = classes()
    batch = 3 * functional.one_hot(labels, CLASSES).float(), labels

    assert len(sizes_of_runs(scores, batch)) == 9 + 3 * (len(HOLLOW) + 1) + CLOSER


@pytest.mark.parametrize("others", [[1, 2, 1, 0], [0, 0, 0, 0], [3, 3, 3, 3]])
def test_rare_classes_of_another_weight_are_seen(others):
    """Most samples, or all, of a batch are of one class where classes are weighed, and the first ones always."""
    weights = torch.tensor([0.1, 2.0, 5.0, 7.0, 1.0])
    labels = torch.tensor([others[-1]] * (SAMPLES - 4) + others)

    def weighed(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1], weight=weights)

    assert find_weighting(linear(), weighed, (features(), labels)).weighting is None
    assert find_weighting(linear(), classify, (features(), labels)).weighting == Weighting("samples")


def weighed_by_class(weights):
    def loss(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor(weights))

    return loss


def test_weights_of_classes_that_the_samples_do_not_have_are_seen():
    labels = classes(0, 2)

    assert find_weighting(linear(), weighed_by_class([1.0, 1, 1, 9, 9]), (features(), labels)).weighting is None
    assert find_weighting(linear(), weighed_by_class([2.0] * 5), (features(), labels)).weighting == MEAN


def weighed_by_hand(model, batch):
    weights = torch.tensor([0.1, 2.0, 5.0, 7.0, 1.0])[batch[1]]
    return (functional.cross_entropy(model(batch[0]), batch[1], reduction="none") * weights).sum() / weights.sum()


@pytest.mark.parametrize("label", [0, 3])
@pytest.mark.parametrize("loss", [weighed_by_class([0.1, 2.0, 5.0, 7.0, 1.0]), weighed_by_hand])
def test_one_class_on_a_gpu_hides_no_weights(loss, label, monkeypatch):
    """Where batches aren't changed freely: an index out of range would end the use of the device."""
    monkeypatch.setattr("memfit.frameworks.torch.trace.loss_probe._is_on_host", lambda *_: False)
    labels = torch.full((SAMPLES,), label)

    assert find_weighting(linear(), loss, (features(), labels)).weighting is None
    assert find_weighting(linear(), classify, (features(), labels)).weighting == MEAN


def each_word(model, batch):
    return functional.cross_entropy(model(batch["words"]).transpose(1, 2), batch["labels"], reduction="none")


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: each_word(model, batch).max(),
        lambda model, batch: each_word(model, batch).mean(1).max(),
        lambda model, batch: by_word(model, batch) + 0.1 * each_word(model, batch).max(),
        lambda model, batch: each_word(model, batch).sum() / (batch["labels"] != -100).sum(1).max(),
    ],
    ids=["of words", "of samples", "added", "of lengths"],
)
@pytest.mark.parametrize("is_first_empty", [True, False])
@pytest.mark.parametrize("num_samples", [3, 8])
def test_a_maximum_over_the_batch_is_no_mean_over_what_counts(loss, is_first_empty, num_samples):
    for seed in range(4):
        torch.manual_seed(seed)
        batch = part_of(sentences(), 0, num_samples)
        if is_first_empty:
            batch["labels"] = batch["labels"].clone()
            batch["labels"][0] = -100

        assert find_weighting(Words(), loss, batch).weighting is None


def test_a_maximum_is_no_mean_over_the_samples_that_are_not_of_some_class():
    def hardest(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="none").max()

    for seed in range(6):
        torch.manual_seed(seed)
        batch = part_of((features(), classes()), 0, 2 + seed % 2)

        assert find_weighting(linear(), hardest, batch).weighting is None


@pytest.mark.parametrize("seed", range(12))
def test_a_small_part_of_a_maximum_is_seen_where_samples_differ_most(seed):
    def loss(model, batch):
        each = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return each.mean() + 1e-4 * each.max()

    torch.manual_seed(seed)
    batch, model = (torch.randn(SAMPLES, 16), torch.randint(0, 4, (SAMPLES,))), nn.Linear(16, 4)

    assert find_weighting(model, loss, batch).weighting is None
    assert find_weighting(model, classify, batch).weighting == MEAN


@pytest.mark.parametrize("seed", range(12))
def test_a_small_part_of_the_greatest_output_is_seen(seed):
    def loss(model, batch):
        outputs = model(batch[0])
        return functional.cross_entropy(outputs, batch[1]) + 1e-4 * outputs.max()

    torch.manual_seed(seed)

    assert find_weighting(linear(), loss, labelled()).weighting is None


@pytest.mark.parametrize("limit", [10, 12, 16])
def test_a_loss_that_does_something_else_with_many_samples_is_no_mean(limit):
    def loss(model, batch):
        each = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return each.mean() if len(each) < limit else each.sum() / 7

    assert find_weighting(linear(), loss, labelled()).weighting is None


@pytest.mark.parametrize("added", [1e-8, 1e-6])
def test_what_is_added_against_a_division_by_zero_is_no_term_of_its_own(added):
    def loss(model, batch):
        each = functional.cross_entropy(model(batch["words"]).transpose(1, 2), batch["labels"], reduction="none")
        return (each * batch["mask"]).sum() / (batch["mask"].sum() + added)

    batch = {"words": words(), "labels": words(), "mask": shortened(torch.ones(SAMPLES, LENGTH), 0)}

    assert find_weighting(Words(), loss, batch).weighting == Weighting("count", "['mask']", 0)


def test_a_batch_that_is_too_large_to_be_run_at_once_is_judged_by_few_samples():
    def loss(model, batch):
        if len(batch[0]) > 8:
            raise MemoryError
        return classify(model, batch)

    found = find_weighting(linear(), loss, labelled())

    assert found.weighting == MEAN
    assert not found.ran_out


def test_parameters_keep_their_types_and_values():
    class Own(nn.Parameter):
        pass

    for kind in (nn.Parameter, Own):
        model = linear()
        model.weight = kind(model.weight.detach())
        weight, values = model.weight, model.weight.detach().clone()

        assert find_weighting(model, classify, labelled()).weighting == MEAN

        assert model.weight is weight and type(weight) is kind
        assert weight.dtype == torch.float32 and torch.equal(weight, values)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_scripted_modules_keep_their_types():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.jit.script(linear()))

    assert find_weighting(model, classify, labelled()).weighting == MEAN

    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_memory_that_runs_out_with_few_samples_is_told():
    def loss(model, batch):
        raise MemoryError

    assert find_weighting(linear(), loss, labelled()).ran_out


HAND_MADE = torch.tensor([0.1, 2.0, 5.0, 7.0, 1.0])


def by_gather(scores, labels):
    return scores.gather(1, labels[:, None])[:, 0]


def by_rows(scores, labels):
    return scores[torch.arange(len(labels)), labels]


def by_one_hot(scores, labels):
    return (scores * functional.one_hot(labels, CLASSES)).sum(1)


@pytest.mark.parametrize("pick", [by_gather, by_rows, by_one_hot])
@pytest.mark.parametrize("label", [0, 3])
def test_one_class_on_a_gpu_hides_no_weights_of_a_cross_entropy_made_by_hand(pick, label, monkeypatch):
    monkeypatch.setattr("memfit.frameworks.torch.trace.loss_probe._is_on_host", lambda *_: False)

    def weighed(model, batch):
        weights = HAND_MADE[batch[1]]
        return -(pick(model(batch[0]).log_softmax(1), batch[1]) * weights).sum() / weights.sum()

    def plain(model, batch):
        return -pick(model(batch[0]).log_softmax(1), batch[1]).mean()

    batch = features(), torch.full((SAMPLES,), label)
    assert find_weighting(linear(), weighed, batch).weighting is None
    assert find_weighting(linear(), plain, batch).weighting == MEAN


def test_a_first_sample_of_which_nothing_counts_hides_nothing():
    labels = words()
    labels[0] = -100

    def squared(model, batch):
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()) ** 2

    def plain(model, batch):
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    two = part_of((words(), labels), 0, 2)
    assert find_weighting(Words(), squared, two).weighting is None
    assert find_weighting(Words(), plain, two).weighting == Weighting("count", "[1]", -100)


def complete_at_first(seed, missing):
    """A batch whose first samples are complete; of the others, elements of the target are missing."""
    torch.manual_seed(seed)
    inputs, target = torch.randn(64, 4).double(), torch.rand(64, 6).double() + 0.2
    target[8:] = torch.where(torch.rand(56, 6) < 0.4, torch.tensor(missing, dtype=torch.float64), target[8:])
    return inputs, target


def masked(keep):
    def loss(model, batch):
        kept = keep(batch[1])
        return (model(batch[0])[kept] - batch[1][kept]).abs().mean()

    return loss


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("keep", "missing"),
    [
        (lambda target: target > 0, 0.0),
        (lambda target: (target > 0.1) & (target < 4.5), 0.0),
        (lambda target: target > -1.5, -2.0),
        (torch.isfinite, math.nan),
    ],
    ids=["positive", "within a range", "beyond a threshold", "finite"],
)
def test_a_mean_over_what_is_not_missing_is_no_mean_over_samples(seed, keep, missing):
    found = find_weighting(nn.Linear(4, 6).double(), masked(keep), complete_at_first(seed, missing))

    assert found.weighting is None
    assert "neither the mean nor the sum" in found.reason or "the count of one tensor" in found.reason


@pytest.mark.parametrize("seed", range(6))
def test_classes_that_do_not_count_are_seen_where_the_first_samples_have_none(seed):
    torch.manual_seed(seed)
    inputs, labels = torch.randn(64, 4), torch.randint(0, 5, (64,))

    def loss(model, batch):
        each = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        counts = (batch[1] > 1).to(each.dtype)
        return (each * counts).sum() / counts.sum().clamp(min=1)

    assert find_weighting(nn.Linear(4, 5), loss, (inputs, labels)).weighting is None


def test_weights_of_samples_are_seen_where_the_first_samples_weigh_alike():
    torch.manual_seed(1)
    weights = torch.rand(64)
    weights[:8] = 1

    def loss(model, batch):
        each = functional.mse_loss(model(batch[0]), batch[1], reduction="none").mean(1)
        return (each * batch[2]).sum() / batch[2].sum()

    assert find_weighting(nn.Linear(4, 6), loss, (torch.randn(64, 4), torch.rand(64, 6), weights)).weighting is None


class Centred(nn.Module):
    """Relates the samples of a batch, in training alone."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, inputs):
        outputs = self.linear(inputs)
        return outputs - outputs.mean(0) if self.training else outputs


def test_what_relates_samples_in_training_alone_is_not_split():
    found = find_weighting(
        Centred(),
        lambda model, batch: model(batch[0]).sub(batch[1]).square().mean(),
        (torch.randn(16, 4), torch.rand(16, 6)),
    )

    assert found.weighting is None


def test_a_mixture_of_samples_is_said_to_be_random():
    def loss(model, batch):
        other = torch.randperm(len(batch[0]))
        return (model(batch[0] + batch[0][other]) - batch[1] - batch[1][other]).square().mean()

    found = find_weighting(nn.Linear(4, 6), loss, (torch.randn(16, 4), torch.rand(16, 6)))

    assert found.is_random

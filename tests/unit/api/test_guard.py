"""The guard as its users see it."""

import contextlib
import copy
import dataclasses
import itertools
import random

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from benchmarks.guard_cases import BATCH as BATCH_SIZE
from benchmarks.guard_cases import MESSAGE, Case, guarded_loop, largest_difference, make
from memfit.core.errors import BadBatch, BadOptimizer
from memfit.core.guarding import BadCheckpoint, BrokenUpdate
from memfit.core.settings import OptimizerKernels, Settings
from memfit.frameworks.torch.apply.recomputation import ReplacedForward


def small(**options):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rare = {name: options.pop(name) for name in memfit.GuardOptions.__slots__ if name in options}
    options = {"plan": None, "options": memfit.GuardOptions(**{"remember": False, **rare}), **options}
    return memfit.Guard(model, optimizer, **options), model


def mean(model, batch):
    return model(batch).square().mean()


def limited(most, loss=mean):
    """A loss that finds memory for so many samples only, more where modules are computed again."""

    def compute(model, batch):
        recomputed = any(isinstance(vars(module).get("forward"), ReplacedForward) for module in model.modules())
        if len(batch) > most * (2 if recomputed else 1):
            raise RuntimeError(MESSAGE.format(size=1000 * len(batch)))
        return loss(model, batch)

    return compute


BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def test_a_step_that_fits_is_a_plain_step():
    guard, _model = small()

    result = guard.step(mean, BATCH)

    assert (result.micro_batches, result.retries, result.updated, result.skipped) == (1, 0, True, False)
    assert result.settings == Settings()
    assert result.approximate == ""
    assert not result.loss.requires_grad
    assert guard.num_updates == 1


def test_a_model_that_returns_its_loss_needs_none():
    class Own(nn.Linear):
        def forward(self, batch):
            return super().forward(batch).square().mean()

    model = Own(4, 4)
    guard = memfit.Guard(model, torch.optim.SGD(model.parameters()), options=memfit.GuardOptions(remember=False))

    assert guard.step(batch=BATCH).updated


@pytest.mark.parametrize(("most", "retries"), [(4, 1), (2, 2), (1, 3)])
def test_no_more_than_three_steps_are_wasted_on_a_batch_eight_times_too_large(most, retries):
    guard, _ = small()

    first, second = guard.step(limited(most), BATCH), guard.step(limited(most), BATCH)

    assert first.retries == len(first.failures) == retries
    assert first.failures[0].requested_bytes == 8000
    assert first.micro_batches == 8 // most
    # What was found is not found out again.
    assert second.retries == 0


def test_a_plan_is_put_into_practice_from_the_first_step():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(512, 64)
    plan = memfit.plan(
        model,
        mean,
        batch,
        optimizer=optimizer,
        device="cpu",
        budget="1MiB",
        options=memfit.PlanOptions(measure=False),
        allow=["micro-batch"],
    )
    with memfit.Guard(model, optimizer, plan=plan, options=memfit.GuardOptions(remember=False)) as guard:
        result = guard.step(mean, batch)

    assert result.retries == 0
    assert result.micro_batches == plan.settings.micro_batches > 1


def test_a_budget_is_planned_for_before_the_first_step():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    guard = memfit.Guard(
        model, torch.optim.SGD(model.parameters(), lr=0.01), budget="1MiB", options=memfit.GuardOptions(remember=False)
    )

    result = guard.step(mean, torch.randn(512, 64))

    assert result.retries == 0
    assert result.micro_batches > 1 or result.settings.checkpoint


def test_a_budget_below_what_is_needed_is_refused():
    model = nn.Linear(512, 512)
    guard = memfit.Guard(
        model, torch.optim.SGD(model.parameters()), budget="10KiB", options=memfit.GuardOptions(remember=False)
    )

    with pytest.raises(memfit.CannotFit, match="below the fixed cost"):
        guard.step(mean, torch.randn(4, 512))


def test_stronger_moves_come_when_a_single_sample_does_not_fit():
    guard, model = small()

    result = guard.step(limited(0.5), BATCH)

    assert result.settings.checkpoint == ("0", "1", "2")
    assert result.micro_batches == 8
    guard.close()
    assert not any("forward" in vars(module) for module in model.modules())


def test_where_nothing_is_left_everything_is_as_before_and_said():
    guard, model = small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()

    with pytest.raises(memfit.CannotFit) as caught:
        guard.step(limited(0), BATCH)

    assert caught.value.exit_code == 3
    text = str(caught.value)
    assert "nothing is left to try after micro-batches of 1 with 3 modules recomputed" in text
    assert "240 B" in text, text
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    # And the guard can be used again.
    assert guard.step(mean, BATCH[:1]).updated


def test_a_batch_that_can_not_be_split_says_which_tensor():
    guard, _ = small()

    def compute(model, batch):
        raise RuntimeError(MESSAGE.format(size=1000))

    with pytest.raises(memfit.CannotFit, match=r"first dimension of the tensor at \[1\] of shape \(3,\) is 3"):
        guard.step(compute, (BATCH, torch.zeros(3), torch.zeros(8)))


def contrastive(model, batch):
    features = F.normalize(model(batch))
    return F.cross_entropy(features @ features.T, torch.arange(len(batch)))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 4), nn.Linear(4, 20)

    def forward(self, ids, mask):
        return self.head(self.embedding(ids) * mask[..., None])


def token_loss(model, batch):
    ids, mask, labels = batch.values() if isinstance(batch, dict) else batch
    return F.cross_entropy(model(ids, mask).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("size", [3, 8])
@pytest.mark.parametrize("make", [tuple, list, lambda parts: dict(zip("abc", parts, strict=True))])
def test_a_batch_of_three_tensors_of_one_shape_is_split(make, size):
    # GIVEN what a language model is trained on: tokens, mask and labels, all of one shape
    torch.manual_seed(0)
    batch = make([torch.randint(0, 20, (size, 6)) for _ in range(3)])
    models = [Tokens()]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]

    # WHEN only a part of it fits
    def tight(model, part):
        if len(next(iter(part.values() if isinstance(part, dict) else part))) > 2:
            raise RuntimeError(MESSAGE.format(size=1000))
        return token_loss(model, part)

    result = memfit.Guard(models[0], optimizers[0], plan=None, options=memfit.GuardOptions(remember=False)).step(
        tight, batch
    )

    # THEN it is split, and the update is that of the whole
    assert result.micro_batches == -(-size // 2)
    token_loss(models[1], batch).backward()
    optimizers[1].step()
    assert largest_difference(*models) < 1e-6


@pytest.mark.parametrize("beside", [(), (torch.zeros(3),)])
def test_a_list_of_samples_is_found_out_by_trying(beside):
    model = nn.Conv2d(3, 2, 3)
    images = [torch.zeros(3, 8, 8) for _ in range(3)]

    def loss(model, batch):
        if len(batch[0]) == 3 and batch[0][0].numel() > 100:
            raise RuntimeError(MESSAGE.format(size=1000))
        return sum(model(image).square().mean() for image in batch[0])

    guard = memfit.Guard(
        model, torch.optim.SGD(model.parameters(), 0.1), plan=None, options=memfit.GuardOptions(remember=False)
    )
    with pytest.raises(memfit.CannotFit, match="The batch was not split"):
        guard.step(loss, (images, *beside))


def test_a_loss_that_mixes_samples_is_not_split():
    guard, _ = small()

    with pytest.raises(memfit.CannotFit, match="The batch was not split"):
        guard.step(limited(2, contrastive), BATCH)


def test_a_loss_that_mixes_samples_is_split_where_that_is_allowed():
    guard, _ = small(approximate=True)

    assert guard.step(limited(2, contrastive), BATCH).micro_batches == 4


def test_losses_of_micro_batches_add_up_as_the_loss_function_says():
    def total(model, batch):
        return model(batch).square().sum()

    done = []
    for loss in (total, limited(2, total)):
        guard, model = small()
        model.double()
        guard.step(loss, BATCH.double())
        done.append(model)

    assert largest_difference(*done) <= 1e-12


def test_batch_norm_is_recomputed_before_it_is_split():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)))
    guard = memfit.Guard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), plan=None, options=memfit.GuardOptions(remember=False)
    )

    exact = guard.step(limited(4), BATCH)
    split = guard.step(limited(2), BATCH)

    assert (exact.micro_batches, exact.approximate) == (1, "")
    assert exact.settings.checkpoint
    assert split.micro_batches == 2
    assert "batch norm" in split.approximate


def test_an_update_that_runs_out_gets_smaller_kernels():
    guard, _model = small()
    left = [2]

    def clip(model):
        if left[0]:
            left[0] -= 1
            raise MemoryError

    guard._loop.transaction._clip = clip
    result = guard.step(mean, BATCH)

    assert result.retries == 2
    assert result.settings.kernels is OptimizerKernels.SINGLE


def test_findings_are_remembered_from_run_to_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    for wasted in (2, 0):
        guard, _ = small(remember=True)
        assert guard.step(limited(2), BATCH).retries == wasted
        guard.close()
    other, _ = small(remember=True)
    assert other.step(limited(2, mean), BATCH[:, :4].double().float()[:6]).retries == 0


def test_the_last_window_is_an_update_too():
    guard, _model = small(accumulate=3)

    results = [guard.step(mean, batch) for batch in guard.batches([BATCH] * 5)]

    assert [result.updated for result in results] == [False, False, True, False, False]
    assert guard.num_updates == 2


def test_schedulers_and_averages_follow_real_updates():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    average = torch.optim.swa_utils.AveragedModel(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    guard = memfit.Guard(
        model,
        optimizer,
        scheduler=scheduler,
        accumulate=2,
        plan=None,
        options=memfit.GuardOptions(ema=average, scaler=scaler, remember=False),
    )

    for factor in (1.0, float("inf"), 1.0):
        for _ in range(2):
            result = guard.step(lambda model, batch, factor=factor: mean(model, batch) * factor, BATCH)
        assert (result.updated, result.skipped) == ((True, False) if factor == 1.0 else (False, True))

    assert scheduler.get_last_lr() == [0.25]
    assert int(average.n_averaged) == 2
    assert guard.num_updates == 2


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_resumed_run_comes_to_the_same_bits(tmp_path, optimizer):
    case = Case("transformer", optimizer, scaled=True)

    def train(folder, stop=None):
        made = make(case, 12)
        torch.manual_seed(5)
        loader = torch.utils.data.DataLoader(
            list(zip(*map(torch.cat, zip(*made.batches, strict=True)), strict=True)), BATCH_SIZE, shuffle=True
        )
        guard = memfit.Guard(
            made.model,
            made.optimizer,
            scheduler=made.scheduler,
            checkpoint=folder,
            plan=None,
            accumulate=2,
            options=memfit.GuardOptions(scaler=made.scaler, checkpoint_every=2, remember=False),
        )
        with guard:
            for _ in range(2):
                for batch in guard.batches(loader):
                    guard.step(made.loss, batch)
                    if guard.num_updates == stop:
                        return made.model, guard
        return made.model, guard

    expected, _ = train(tmp_path / "whole")
    for stop in (3, 7, 8):
        train(tmp_path / "parts", stop)
    found, guard = train(tmp_path / "parts")

    assert guard.resumed_from == 8
    assert guard.num_updates == 12
    assert largest_difference(found, expected) == 0


def test_a_checkpoint_of_another_model_names_the_difference(tmp_path):
    guard, _ = small(checkpoint=tmp_path)
    guard.step(mean, BATCH)
    guard.save()
    guard.close()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4 if i < 2 else 5), nn.Tanh()) for i in range(3)))

    with pytest.raises(BadCheckpoint, match=r"2\.0\.weight"):
        memfit.Guard(model, torch.optim.AdamW(model.parameters()), checkpoint=tmp_path)


def test_a_checkpoint_in_the_middle_of_a_window_is_refused(tmp_path):
    guard, _ = small(checkpoint=tmp_path, accumulate=2)
    guard.step(mean, BATCH)

    with pytest.raises(memfit.BadInput, match="end of an accumulation window"):
        guard.save()


def train(guard, num_epochs=2, stop=None):
    """The updates that were made."""
    before = guard.num_updates
    for _ in guard.epochs(num_epochs):
        for batch in guard.batches([BATCH] * 3):
            guard.step(mean, batch)
            if guard.num_updates == stop:
                return guard.num_updates - before
    return guard.num_updates - before


@pytest.mark.parametrize("end", ["epochs", "close", "with", "nothing", "exit"])
def test_a_run_that_ended_is_not_repeated(tmp_path, end):
    # GIVEN a run that comes to its end, and writes no checkpoints on its way
    guard, model = small(checkpoint=tmp_path, checkpoint_every=1000)
    if end == "epochs":
        assert train(guard) == 6
        guard._driver._mark = None
    elif end == "with":
        with guard:
            assert train(guard, stop=5) == 5
    else:
        assert train(guard, stop=5) == 5
    if end == "close":
        guard.close()
    if end == "exit":
        memfit.guard.checkpointing._save_what_is_left()
    expected = copy.deepcopy(model.state_dict())
    del guard, model

    # WHEN it is started again
    again, model = small(checkpoint=tmp_path, checkpoint_every=1000)

    # THEN nothing is repeated
    assert again.resumed_from == (6 if end == "epochs" else 5)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert train(again) == (0 if end == "epochs" else 1)
    again.close()


def test_what_came_after_the_last_update_is_not_taken_for_it(tmp_path):
    # GIVEN a batch that fails, and parameters that were changed by hand
    guard, _ = small(checkpoint=tmp_path / "failed", checkpoint_every=1000)
    with pytest.raises(ZeroDivisionError), guard:
        for batch in guard.batches([BATCH] * 3):
            guard.step(mean if guard.num_updates < 1 else lambda model, batch: 1 / 0, batch)
    assert not list((tmp_path / "failed").glob("step-*"))
    guard, model = small(checkpoint=tmp_path / "changed", checkpoint_every=1000)
    train(guard, stop=2)
    with torch.no_grad():
        model[0][0].weight.zero_()
    guard.close()
    assert not list((tmp_path / "changed").glob("step-*"))

    # AND the best parameters, which come into the model when training is over
    guard, model = small(checkpoint=tmp_path / "best", checkpoint_every=1000)
    guard.best.offer(1.0, higher_is_better=True)
    train(guard, stop=2)
    last = model[0][0].weight.clone()
    guard.best.load_into()
    assert not torch.equal(last, model[0][0].weight)
    guard.close()
    again, model = small(checkpoint=tmp_path / "best")
    assert again.resumed_from == 2
    assert torch.equal(last, model[0][0].weight)
    again.close()


def test_two_guards_in_one_folder_are_refused(tmp_path):
    first, _ = small(checkpoint=tmp_path)
    with pytest.raises(memfit.BadInput, match=r"another guard of this process\. Give each guard a folder of its own"):
        small(checkpoint=tmp_path)
    first.close()
    # The same cell of a notebook, run again, goes on with its model and optimizer.
    second, model = small(checkpoint=tmp_path)
    optimizer = second._loop.optimizer
    third = memfit.Guard(model, optimizer, checkpoint=tmp_path)
    third.close()


def test_the_best_parameters_are_kept(tmp_path):
    for folder in (None, tmp_path):
        guard, model = small(checkpoint=folder)
        guard.step(mean, BATCH)
        best = {name: value.clone() for name, value in model.state_dict().items()}
        assert guard.best.offer(0.5, higher_is_better=True)
        guard.step(mean, BATCH)
        assert not guard.best.offer(0.4, higher_is_better=True)

        guard.best.load_into()

        assert all(torch.equal(value, best[name]) for name, value in model.state_dict().items())
        guard.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "accumulate must be a whole number from 1 up, but 0"),
        ({"keep": True}, "keep must be a whole number"),
        ({"plan": "yes"}, "plan must be 'auto', a Plan or None, but 'yes'"),
        ({"budget": "much"}, "'much' is not a size"),
        ({"micro_batch_size": -1}, "micro_batch_size must be"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(memfit.BadInput, match=message):
        small(**options)


@pytest.mark.parametrize("given", [(), (lambda model, batch: model(batch).mean(),)])
def test_a_step_without_a_batch_begins_nothing(given):
    module = torch.nn.Linear(2, 2)
    guard = memfit.Guard(module, torch.optim.SGD(module.parameters(), lr=0.1), plan=None)

    with pytest.raises(BadBatch, match=r"step needs a batch: guard\.step\(loss, batch\)"):
        guard.step(*given)
    assert guard.num_updates == 0 and not guard._torch_loop.transaction.entries


def test_objects_that_are_none_of_the_models_are_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(memfit.BadInput, match="Module, but int"):
        memfit.Guard(3, None)
    with pytest.raises(BadOptimizer, match="needs the optimizer of the model, but NoneType"):
        memfit.Guard(model, None)
    with pytest.raises(BadOptimizer, match="none of the model's parameters"):
        memfit.Guard(model, torch.optim.SGD(nn.Linear(2, 2).parameters()))
    with pytest.raises(BadOptimizer, match="LBFGS"):
        memfit.Guard(model, torch.optim.LBFGS(model.parameters()))


def test_sparse_gradients_and_shared_parameters_are_replayed():
    done = []
    for most in (8, 2):
        torch.manual_seed(0)
        embedding = nn.Embedding(20, 4, sparse=True, dtype=torch.double)
        model = nn.Sequential(embedding, embedding_mean())
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        guard = memfit.Guard(model, optimizer, plan=None, options=memfit.GuardOptions(remember=False))
        tokens = torch.arange(40).view(8, 5) % 20
        for _ in range(3):
            guard.step(limited(most), tokens)
        done.append(model)

    assert largest_difference(*done) <= 1e-12


def embedding_mean():
    class Mean(nn.Module):
        def forward(self, values):
            return values.mean(1)

    return Mean()


def test_a_compiled_model_is_guarded():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    compiled = torch.compile(model, backend="eager")
    guard = memfit.Guard(
        compiled, torch.optim.SGD(compiled.parameters(), lr=0.1), plan=None, options=memfit.GuardOptions(remember=False)
    )

    result = guard.step(limited(4), BATCH)

    assert result.micro_batches == 2


def test_a_failed_replay_of_a_window_at_the_end_of_an_epoch():
    counts = itertools.count()

    def sometimes(model, batch):
        if next(counts) == 2:
            raise RuntimeError(MESSAGE.format(size=10))
        return mean(model, batch)

    guard, _ = small(accumulate=4)
    results = [guard.step(sometimes, batch) for batch in guard.batches([BATCH] * 3)]

    assert [result.retries for result in results] == [0, 0, 1]
    assert guard.num_updates == 1


def test_growing_back_changes_nothing_but_rounding():
    case = Case("cnn", "sgd", dropout=0.0, dtype=torch.float64)
    plain = guarded_loop(case, 20)
    grown = guarded_loop(case, 20, micro_batch_size=2, grow_after=3)

    assert grown.parts[0] == 8
    assert grown.parts[-1] == 1
    assert sorted(grown.parts, reverse=True) == grown.parts
    assert largest_difference(grown.model, plain.model) < 1e-10


def plain_update(model, *windows):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for window in windows:
        optimizer.zero_grad()
        for batch in window:
            (mean(model, batch) / len(window)).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_batch_whose_passes_end_in_an_exception_does_not_count(error):
    def interrupted(model, batch):
        mean(model, batch).backward()
        raise error

    guard, model = small(accumulate=2)
    _, expected = small()
    guard.step(mean, BATCH)

    with pytest.raises(error):
        guard.step(interrupted, BATCH * 2)

    assert guard.step(mean, BATCH * 3).updated
    plain_update(expected, (BATCH, BATCH * 3))
    assert largest_difference(model, expected) < 1e-6


def test_the_end_of_an_epoch_makes_up_for_a_dropped_batch():
    def refused(model, batch):
        raise ValueError

    guard, model = small(accumulate=3)
    _, expected = small()
    for loss, batch in zip((mean, mean, refused), guard.batches([BATCH, BATCH * 2, BATCH * 3]), strict=False):
        with contextlib.suppress(ValueError):
            guard.step(loss, batch)
    list(guard.batches([]))

    plain_update(expected, (BATCH, BATCH * 2))
    assert guard.num_updates == 1
    assert largest_difference(model, expected) < 1e-6


def test_an_update_that_was_interrupted_is_not_gone_on_from():
    guard, _ = small()

    def interrupt(optimizer, args, kwargs):
        raise KeyboardInterrupt

    guard._loop.optimizer.register_step_post_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        guard.step(mean, BATCH)

    with pytest.raises(BrokenUpdate, match="KeyboardInterrupt"):
        guard.step(mean, BATCH)


def test_a_budget_that_was_refused_is_refused_again():
    model = nn.Linear(512, 512)
    guard = memfit.Guard(
        model, torch.optim.SGD(model.parameters()), budget="10KiB", options=memfit.GuardOptions(remember=False)
    )

    for _ in range(2):
        with pytest.raises(memfit.CannotFit, match="below the fixed cost"):
            guard.step(mean, torch.randn(4, 512))


@pytest.mark.parametrize(("num_samples", "parts"), [(8, 4), (5, 2), (3, 1)])
def test_a_batch_norm_never_gets_a_single_sample_of_a_larger_batch(num_samples, parts):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    guard = memfit.Guard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        plan=None,
        options=memfit.GuardOptions(remember=False, micro_batch_size=1),
    )

    result = guard.step(mean, BATCH[:num_samples])

    assert result.micro_batches == parts
    assert model[1].num_batches_tracked == 1


def total(model, batch):
    return model(batch).square().sum()


def test_running_out_does_not_change_how_the_batches_of_a_window_are_weighed():
    # GIVEN a loss that is a sum, and batches of different sizes
    batches = (BATCH, BATCH[:3], BATCH[:6])
    guard, expected = small(accumulate=3)
    for batch in batches:
        guard.step(total, batch)

    # WHEN
    guard, model = small(accumulate=3)
    results = [guard.step(limited(4, total), batch) for batch in batches]

    # THEN
    assert [result.micro_batches for result in results] == [2, 1, 2]
    assert largest_difference(model, expected) < 1e-6


def test_findings_of_a_run_with_a_plan_are_not_those_of_one_without(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plan = memfit.plan(
        model, mean, BATCH, optimizer=optimizer, device="cpu", budget="1MiB", options=memfit.PlanOptions(measure=False)
    )
    plan = dataclasses.replace(plan, settings=Settings(precision="amp-bf16", step_in_backward=True))
    with memfit.Guard(model, optimizer, plan=plan) as guard:
        first = guard.step(limited(4), BATCH)
    with memfit.Guard(model, optimizer, plan=None) as guard:
        second = guard.step(mean, BATCH)

    assert (first.settings.precision, first.settings.step_in_backward) == ("amp-bf16", False)
    assert second.settings == Settings()


def test_a_plan_in_float16_has_a_scaler():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plan = memfit.plan(
        model, mean, BATCH, optimizer=optimizer, device="cpu", budget="1MiB", options=memfit.PlanOptions(measure=False)
    )
    plan = dataclasses.replace(plan, settings=Settings(precision="amp-fp16"))
    seen = []
    model.weight.register_hook(lambda gradient: seen.append(float(gradient.abs().max())))

    with memfit.Guard(model, optimizer, plan=plan, options=memfit.GuardOptions(remember=False)) as guard:
        guard.step(lambda model, batch: model(batch).float().square().mean(), BATCH)

    assert seen[0] > 100


def test_a_batch_that_its_loss_changes_is_not_run_again():
    def in_place(model, batch):
        batch.mul_(0.5)
        return limited(4)(model, batch)

    guard, model = small()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    with pytest.raises(memfit.CannotFit, match="changed in place"):
        guard.step(in_place, BATCH.clone())

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert guard.step(mean, BATCH).updated


def test_what_only_the_loss_function_knows_comes_back():
    def run(failing):
        guard, _ = small(clip=failing)
        judge = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        for factor in range(1, 4):
            guard.step(lambda model, batch: judge(model(batch)).square().mean(), BATCH * factor)
        return judge

    def clip(model):
        if next(counts) == 1:
            raise RuntimeError(MESSAGE.format(size=10))

    torch.manual_seed(0)
    expected = run(None)
    counts = itertools.count()

    assert torch.equal(run(clip)[1].running_mean, expected[1].running_mean)


@pytest.mark.parametrize("error", [KeyError, MemoryError, memfit.CannotFit])
def test_a_plan_that_can_not_be_made_does_not_end_the_run(error, monkeypatch):
    def broken(*args, **options):
        raise error("no plan")

    monkeypatch.setattr("memfit.api.plan.plan", broken)
    guard, _ = small(plan="auto")

    assert guard.step(limited(4), BATCH).micro_batches == 2


def test_an_update_that_finds_no_memory_before_it_changed_anything_is_replayed():
    done = []
    for times in (0, 1):
        guard, model = small()
        update = guard._loop.transaction._update
        plain, left = update.step, [times]

        def step(scaler=None, plain=plain, left=left):
            if left[0]:
                left[0] -= 1
                raise RuntimeError(MESSAGE.format(size=10))
            return plain(scaler)

        update.step = step
        assert guard.step(mean, BATCH).retries == times
        assert guard.num_updates == 1
        done.append(model)

    assert largest_difference(*done) == 0


@pytest.mark.parametrize("draws_between", [False, True])
def test_random_numbers_go_on_through_a_window_that_is_run_again(draws_between):
    # GIVEN a loss that draws once for each part, and, from Python's generator, a program that draws for each batch
    def noisy(model, batch):
        return (model(batch + torch.rand(1)) * numpy.random.rand()).square().mean()

    def train(loss, **options):
        guard, model = small(accumulate=3, **options)
        torch.manual_seed(3)
        numpy.random.seed(4)
        random.seed(5)
        results = []
        for number in range(6):
            shift = random.random() if draws_between else 0.0
            results.append(guard.step(lambda model, batch, number=number: loss(model, batch, number), BATCH + shift))
        return guard, model, results

    # WHEN the last batch of a window is the first that doesn't fit, and all are run again in two parts each
    def tight(model, batch, number):
        if number == 2 and len(batch) > 4:
            raise RuntimeError(MESSAGE.format(size=1000))
        return noisy(model, batch)

    _, found, results = train(tight)
    after = torch.rand(1), numpy.random.rand(), random.random()
    assert [result.micro_batches for result in results] == [1, 1, 2, 2, 2, 2]

    # THEN all is as in a run that had two parts from the beginning, to the bit
    _, expected, _ = train(lambda model, batch, number: noisy(model, batch), micro_batch_size=4)
    assert largest_difference(found, expected) == 0
    assert after == (torch.rand(1), numpy.random.rand(), random.random())


def test_a_batch_that_can_not_fit_leaves_the_rest_of_its_window():
    done = []
    for too_large in (False, True):
        guard, model = small(accumulate=2)
        guard.step(mean, BATCH)
        if too_large:
            with pytest.raises(memfit.CannotFit):
                guard.step(limited(0), BATCH)
        assert guard.step(mean, BATCH * 2).updated
        done.append(model)

    assert largest_difference(*done) < 1e-6


def test_a_window_can_be_ended_by_hand(caplog):
    guard, _ = small(accumulate=3)
    guard.step(mean, BATCH)
    guard.finish_window()
    assert guard.num_updates == 1
    guard.step(mean, BATCH)

    guard.close()

    assert "1 batches of an accumulation window" in caplog.text


def test_a_guard_can_not_be_copied():
    guard, _ = small()

    with pytest.raises(TypeError, match="can't be copied"):
        copy.deepcopy(guard)


def test_an_update_without_its_scheduler_is_a_broken_one():
    # GIVEN a scheduler that runs out of memory after the update was made
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    guard = memfit.Guard(model, optimizer, scheduler=scheduler, plan=None, options=memfit.GuardOptions(remember=False))

    def step():
        raise MemoryError

    scheduler.step = step
    for _ in range(2):
        with pytest.raises(memfit.BrokenUpdate, match="Resume from the last checkpoint"):
            guard.step(lambda model, batch: model(batch).sum(), torch.ones(3, 4))


def test_a_moving_average_that_runs_out_leaves_a_broken_update():
    model = torch.nn.Linear(4, 2)
    average = torch.optim.swa_utils.AveragedModel(model)
    options = memfit.GuardOptions(ema=average, remember=False)
    guard = memfit.Guard(model, torch.optim.SGD(model.parameters(), 0.1), plan=None, options=options)

    def update(model):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    average.update_parameters = update
    with pytest.raises(memfit.BrokenUpdate):
        guard.step(lambda model, batch: model(batch).sum(), torch.ones(3, 4))


class Counting(nn.Module):
    """Counts its forward passes, in a buffer and in an attribute, and averages what it has seen."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("constant", torch.ones(3))
        self.passes = 0

    def forward(self, inputs):
        self.steps += 1
        self.passes += 1
        return self.norm(self.layer(inputs)) * self.constant.sum()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_a_model_counts_is_said_to_move_with_each_micro_batch(accumulate):
    plain, guarded = Counting(), Counting()
    for _ in range(2 * accumulate):
        mean(plain, BATCH)
    options = memfit.GuardOptions(remember=False, micro_batch_size=4)
    optimizer = torch.optim.SGD(guarded.parameters(), lr=0.1)
    guard = memfit.Guard(guarded, optimizer, plan=None, accumulate=accumulate, options=options)

    results = [guard.step(mean, BATCH) for _ in range(2 * accumulate)]

    # THEN the counts are not those of a plain loop, and every step says so
    assert int(guarded.steps) == guarded.passes == 2 * plain.passes
    assert int(guarded.norm.num_batches_tracked) == int(plain.norm.num_batches_tracked)
    said = "the forward pass changes 'passes' and 1 more once per micro-batch"
    assert all(said in result.approximate for result in results)


def test_what_a_model_counts_in_whole_batches_is_not_spoken_of():
    model = Counting()
    guard = memfit.Guard(model, torch.optim.SGD(model.parameters()), options=memfit.GuardOptions(remember=False))

    assert [guard.step(mean, BATCH).approximate for _ in range(2)] == ["", ""]
    assert int(model.steps) == 2


def branching(model, batch):
    """A sum over samples where there are few, a mean where there are many."""
    each = model(batch).square().mean(1)
    return each.sum() / 4 if len(batch) < 24 else each.mean()


def with_maximum(model, batch):
    outputs = model(batch)
    return outputs.square().mean() + 1e-4 * outputs.max()


@pytest.mark.parametrize("loss", [branching, with_maximum])
def test_losses_that_are_no_means_but_look_like_ones_are_run_as_a_whole(loss, caplog):
    batches = torch.randn(3, 32, 4, generator=torch.Generator().manual_seed(2))
    guard, model = small(micro_batch_size=8)
    _, plain = small()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)

    for batch in batches:
        guard.step(loss, batch)
        optimizer.zero_grad()
        loss(plain, batch).backward()
        optimizer.step()

    assert "Batches are run as a whole" in caplog.text
    assert all(map(torch.equal, model.parameters(), plain.parameters()))

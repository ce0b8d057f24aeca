import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.api.jobs import open_estimator
from memfit.core.device import Origin
from memfit.core.errors import BadInput
from memfit.core.plan import Plan, PlanNotFound
from memfit.core.settings import Keeps, Settings
from memfit.core.units import MIB
from memfit.frameworks.torch.trace import calibration
from memfit.frameworks.torch.trace.subject import Subject


class Block(nn.Module):
    def __init__(self, width, norm=nn.LayerNorm):
        super().__init__()
        self.norm, self.up, self.down = norm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, width=64, depth=6, norm=nn.LayerNorm):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, norm) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def classify(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def contrast(model, batch):
    features = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(features @ features.T, torch.arange(len(features), device=features.device))


def batch_of(count=2048, width=64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, width, generator=generator), torch.randint(10, (count,), generator=generator)


def plan_for(model, share, loss=classify, batch=None, **options):
    """A plan within a share of what the step needs as it is."""
    batch = batch_of() if batch is None else batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plain = memfit.estimate(model, loss, batch, optimizer=optimizer, device="cpu")
    options = {"device": "cpu", "options": memfit.PlanOptions(measure=False)} | options
    return memfit.plan(model, loss, batch, optimizer=optimizer, budget=round(share * plain.peak_bytes), **options)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Stack()


@pytest.fixture
def timed_briefly(monkeypatch):
    monkeypatch.setattr(calibration, "_MAX_TURNS", 2)


@pytest.mark.parametrize("share", [0.9, 0.6, 0.4, 0.3])
def test_a_plan_is_proven_to_fit(model, share):
    plan = plan_for(model, share)
    assert plan.fits and plan.after.peak_bytes <= plan.budget_bytes < plan.before.peak_bytes
    assert plan.keeps in (Keeps.EXACT, Keeps.ROUNDING)
    assert plan.estimate_after.timeline.peak()[1] == plan.after.peak_bytes


def test_with_room_to_spare_nothing_slows_the_step(model):
    plan = plan_for(model, 2.0)
    assert plan.settings.micro_batches == 1
    assert not plan.settings.checkpoint and not plan.settings.offload


def test_less_memory_takes_no_less_time(model):
    times = [plan_for(model, share).seconds_after.seconds for share in (0.9, 0.6, 0.4)]
    assert times == sorted(times)


def test_the_same_question_has_the_same_answer(model):
    first, second = plan_for(model, 0.5), plan_for(model, 0.5)
    assert first.settings == second.settings
    assert [point.settings for point in first.front] == [point.settings for point in second.front]


def test_the_front_holds_the_plan_and_trades_memory_for_time(model):
    plan = plan_for(model, 0.5)
    assert sum(point.verified for point in plan.front) == 1
    peaks = [point.peak_bytes for point in plan.front]
    assert peaks == sorted(peaks, reverse=True)


def test_every_move_says_what_it_saves_and_costs(model):
    plan = plan_for(model, 0.4)
    assert plan.moves
    for move in plan.moves:
        assert move.saves_origin is Origin.SIMULATED
        assert move.costs_seconds is not None
    assert sum(move.saves_bytes > 0 for move in plan.moves) >= 1


def test_only_what_is_allowed_is_used(model):
    plan = plan_for(model, 0.6, allow=("checkpoint",))
    assert {move.name for move in plan.moves} == {"checkpoint"}
    plan = plan_for(model, 0.6, allow="micro-batch")
    assert {move.name for move in plan.moves} == {"micro-batch"}


@pytest.mark.parametrize("allow", [("checkpoint",), ("checkpoint", "micro-batch")])
def test_an_applied_plan_gives_the_plain_gradient(allow):
    # GIVEN a plan for a model in double precision
    torch.manual_seed(1)
    model, batch = Stack().double(), (batch_of()[0].double(), batch_of()[1])
    plan = plan_for(model, 0.6, batch=batch, allow=allow)
    assert plan.moves
    plain = classify(model, batch)
    plain.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]

    # WHEN it is applied
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with plan.apply(model, optimizer) as fitted:
        value = fitted.backward(classify, batch)

    # THEN loss and gradients are those of the plain step
    assert value.item() == pytest.approx(plain.item(), rel=1e-12)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-11, atol=1e-14)


def test_a_saved_plan_is_applied_like_the_first(model, tmp_path):
    plan = plan_for(model, 0.5)
    plan.save(tmp_path / "plan.json")
    loaded = memfit.load_plan(tmp_path / "plan.json")
    assert loaded == plan and loaded.settings == plan.settings
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with loaded.apply(model, optimizer) as fitted:
        first = fitted.step(classify, batch_of())
        for _ in range(5):
            last = fitted.step(classify, batch_of())
    assert last < first


def test_a_model_without_values_is_planned_too():
    def build():
        return Stack(width=256)

    batch = (torch.empty(128, 256, device="meta"), torch.empty(128, dtype=torch.int64, device="meta"))
    plain = memfit.estimate(build, classify, batch, optimizer="adamw", device="a100-40gb")
    budget = round(plain.context_bytes + 0.9 * plain.reserved_peak_bytes)
    plan = memfit.plan(build, classify, batch, optimizer="adamw", device="a100-40gb", budget=budget)
    assert plan.fits
    assert plan.seconds_after.origin is Origin.SIMULATED
    assert any(note.code == "loss-assumed" for note in plan.notes) or plan.settings.micro_batches == 1


def test_another_effective_batch_is_that_of_one_update(model):
    plan = plan_for(model, 1.0, options=memfit.PlanOptions(effective_batch=4096))
    assert plan.batch_size == 4096
    assert plan.fits and plan.moves


def test_precision_is_kept_unless_told_otherwise(model):
    assert plan_for(model, 0.5).settings.precision is None
    names = {move.name for move in plan_for(model, 0.5, precision="auto", allow=("autocast", "checkpoint")).moves}
    assert names <= {"autocast", "checkpoint"}


class TestNothingFits:
    def test_the_message_says_what_is_left_and_what_would_do(self, model):
        with pytest.raises(PlanNotFound) as caught:
            plan_for(model, 0.05)
        text = str(caught.value)
        assert "no plan fits `Stack` into" in text and "the smallest needs" in text
        assert "parameter" in text and "optimizer state" in text
        assert caught.value.device_name and "a larger budget" in text
        assert caught.value.smallest.after.peak_bytes > caught.value.smallest.budget_bytes
        assert not caught.value.smallest.fits

    def test_a_budget_below_the_weights_is_told_at_once(self, model):
        with pytest.raises(PlanNotFound, match=r"below the fixed cost of Stack: its weights take"):
            memfit.plan(model, classify, batch_of(), optimizer="adamw", device="cpu", budget="64KiB")

    def test_what_could_be_allowed_is_named(self, model):
        with pytest.raises(PlanNotFound, match="8-bit-optimizer"):
            plan_for(model, 0.05)


class TestWhatStandsInTheWay:
    def test_batch_norm_keeps_micro_batches_out(self):
        model = Stack(norm=nn.BatchNorm1d)
        plan = plan_for(model, 0.7)
        assert plan.settings.micro_batches == 1
        reason = next(refusal.reason for refusal in plan.refused if refusal.name == "micro-batch")
        assert "batch norm" in reason and "approximate" in reason

    def test_approximate_lets_them_in_and_says_so(self):
        model = Stack(norm=nn.BatchNorm1d)
        plan = plan_for(model, 0.5, allow=("micro-batch", "approximate"))
        (move,) = plan.moves
        assert move.keeps is Keeps.CHANGES and "batch norm" in move.caveat
        assert plan.keeps is Keeps.CHANGES

    def test_batch_norm_in_evaluation_mode_is_no_obstacle(self):
        model = Stack(norm=nn.BatchNorm1d)
        for block in model.blocks:
            block.norm.eval()
        assert plan_for(model, 0.5, allow=("micro-batch",)).settings.micro_batches > 1

    def test_a_loss_that_compares_samples_keeps_micro_batches_out(self, model):
        plan = plan_for(model, 0.7, loss=contrast)
        assert plan.settings.micro_batches == 1
        reason = next(refusal.reason for refusal in plan.refused if refusal.name == "micro-batch")
        assert "neither" in reason or "compared" in reason

    def test_a_batch_that_cannot_be_split_names_its_tensor(self, model):
        batch = {"inputs": batch_of()[0], "labels": batch_of()[1], "weights": torch.ones(10)}

        def weighted(model, batch):
            return F.cross_entropy(model(batch["inputs"]), batch["labels"], weight=batch["weights"])

        plan = plan_for(model, 0.7, loss=weighted, batch=batch)
        reason = next(refusal.reason for refusal in plan.refused if refusal.name == "micro-batch")
        assert "weights" in reason and "(10,)" in reason

    def test_buffers_that_change_keep_micro_batches_out(self):
        model = Stack()
        nn.utils.parametrizations.spectral_norm(model.blocks[0].up)
        plan = plan_for(model, 0.7)
        assert plan.settings.micro_batches == 1
        assert any(r.name == "micro-batch" and "changes buffers" in r.reason for r in plan.refused)

    def test_sparse_gradients_keep_micro_batches_out(self):
        class Sparse(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(100, 64, sparse=True)
                self.stack = Stack()

            def forward(self, tokens):
                return self.stack(self.table(tokens))

        model, batch = Sparse(), (torch.randint(100, (2048,)), torch.randint(10, (2048,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain = memfit.estimate(model, classify, batch, optimizer=optimizer, device="cpu")
        budget = round(0.7 * plain.peak_bytes)
        plan = memfit.plan(
            model,
            classify,
            batch,
            optimizer=optimizer,
            device="cpu",
            budget=budget,
            options=memfit.PlanOptions(measure=False),
        )
        assert plan.settings.micro_batches == 1
        assert any(r.name == "micro-batch" and "sparse" in r.reason for r in plan.refused)

    def test_a_sum_is_added_up(self, model):
        def total(model, batch):
            return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

        plan = plan_for(model, 0.4, loss=total, allow=("micro-batch",))
        assert plan.settings.weighting.kind == "sum"

    def test_shared_and_frozen_parameters_are_planned_and_applied(self):
        torch.manual_seed(2)
        model = Stack().double()
        model.blocks[3].up.weight = model.blocks[0].up.weight
        model.blocks[1].requires_grad_(False)
        batch = (batch_of()[0].double(), batch_of()[1])
        plan = plan_for(model, 0.6, batch=batch, allow=("checkpoint", "micro-batch"))
        classify(model, batch).backward()
        expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        with plan.apply(model, torch.optim.AdamW(model.parameters())) as fitted:
            fitted.backward(classify, batch)
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-14)

    def test_modules_that_cannot_be_computed_again_are_named(self):
        class Doubling(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)

            def forward(self, x):
                return self.down(self.up(x.mul_(2)).tanh())

        class Model(Stack):
            def __init__(self):
                super().__init__()
                self.doubling = Doubling()

            def forward(self, x):
                x = self.doubling(self.blocks[0](x) + 1)
                for block in self.blocks[1:]:
                    x = block(x)
                return self.head(x)

        plan = plan_for(Model(), 0.7)
        reasons = [refusal.reason for refusal in plan.refused if refusal.name == "checkpoint"]
        assert any("doubling (Doubling)" in reason and "in place" in reason for reason in reasons)


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"precision": "int3"}, "precision must be keep, auto or one of"),
            ({"allow": ("magic",)}, "'magic' is not something that can be allowed"),
            ({"count": 0}, "count must be a whole number from 1 up"),
            ({"count": "2"}, "count must be a whole number from 1 up"),
            ({"count": 1.5}, "count must be a whole number from 1 up"),
            ({"allow": 3}, "allow takes words"),
            ({"allow": [None]}, "allow takes words"),
            ({"budget": float("nan")}, "a budget is a size"),
            ({"budget": [1]}, "a budget is a size"),
            ({"budget": True}, "a budget is a size"),
            ({"count": 2, "allow": ("exact",)}, "'shard' is not allowed"),
            ({"budget": 0}, "must be positive"),
            ({"budget": "24 bananas"}, "24 bananas"),
            ({"device": "t4", "budget": "100GiB"}, "more than NVIDIA Tesla T4 has"),
            ({"device": "rtx-3090", "options": memfit.PlanOptions(measure=True)}, "can't be measured"),
            ({"options": memfit.PlanOptions(effective_batch=0)}, "at least 1"),
        ],
    )
    def test_one_clear_message(self, model, options, words):
        options = {"device": "cpu", "budget": "1GiB"} | options
        with pytest.raises(BadInput, match=words):
            memfit.plan(model, classify, batch_of(), optimizer="adamw", **options)

    def test_inference_is_not_planned(self, model):
        job = memfit.Job(model, classify, batch_of(), mode="inference")
        with pytest.raises(BadInput, match="a plan is for training"):
            memfit.plan(job, device="cpu", budget="1GiB")

    def test_a_plan_is_applied_with_the_model_s_own_optimizer(self, model):
        plan = plan_for(model, 0.9)
        with pytest.raises(BadInput, match="are not the model's"):
            plan.apply(model, torch.optim.SGD(Stack().parameters(), lr=0.1))
        changed = replace(plan, settings=Settings(step_in_backward=True))
        with pytest.raises(BadInput, match="there is no optimizer"):
            changed.apply(model)

    def test_a_plan_is_applied_to_a_module(self, model):
        with pytest.raises(BadInput, match=r"nn\.Module"):
            plan_for(model, 0.9).apply("model")


def test_a_step_is_measured_where_the_device_is_in_hand(model, timed_briefly):
    plan = plan_for(model, 2.0, options=memfit.PlanOptions(measure=True))
    assert plan.seconds_after.origin is Origin.MEASURED
    assert any(note.code == "calibrated" and "real passes of 256" in note.text for note in plan.notes)


def test_times_of_a_plan_are_known_as_those_of_an_estimate(model):
    """Both come from one model of kernels, which knows GPUs whose rates are in the catalogue."""
    options = {"loss": classify, "batch": batch_of(), "optimizer": "adamw"}
    origins = {}
    for device in ("rtx-3090", "24GiB"):
        plan = memfit.plan(model, device=device, **options)
        origins[device] = {plan.seconds_before.origin, *(move.costs_origin for move in plan.moves)}
    assert origins == {"rtx-3090": {Origin.SIMULATED}, "24GiB": {Origin.ASSUMED}}
    assert memfit.estimate(model, device="rtx-3090", **options).time.origin is Origin.SIMULATED
    assert memfit.estimate(model, device="24GiB", **options).time is None


def test_what_nobody_timed_is_not_called_measured(model):
    plan = plan_for(model, 0.6)
    assert plan.seconds_after.origin is plan.seconds_before.origin is Origin.ASSUMED
    assert all(move.costs_origin is Origin.ASSUMED for move in plan.moves)


def test_the_plan_itself_is_timed_where_the_device_is_in_hand(model, timed_briefly):
    plan = plan_for(model, 0.4, options=memfit.PlanOptions(measure=True))
    assert plan.seconds_after.origin is Origin.MEASURED
    assert plan.fits and plan.seconds_after.seconds > 0


def test_steps_that_are_too_slow_to_compare_are_not_raced(model, monkeypatch):
    # GIVEN steps of half a minute
    monkeypatch.setattr(Subject, "time_passes", lambda *_: pytest.fail("timed"))
    measured = Subject.measure
    slow = lambda one: replace(one, forward_seconds=10.0 * one.batch_size, backward_seconds=20.0)  # noqa: E731
    monkeypatch.setattr(Subject, "measure", lambda *a, **options: tuple(map(slow, measured(*a, **options))))

    plan = plan_for(model, 0.6, options=memfit.PlanOptions(measure=True))

    assert plan.fits
    assert plan.seconds_after.origin is Origin.ASSUMED


def test_a_plan_is_bounded_in_time(model, monkeypatch):
    # GIVEN no time at all
    monkeypatch.setattr(Subject, "time_passes", lambda *_: pytest.fail("timed"))
    monkeypatch.setattr(Subject, "measure", lambda *_, **options: pytest.fail("timed"))

    plan = plan_for(model, 0.6, options=memfit.PlanOptions(measure=None, seconds=0))

    # THEN there is one that fits all the same, the first that was proven to
    assert plan.fits
    with pytest.raises(BadInput, match="seconds must be a number from 0 up"):
        plan_for(model, 0.6, options=memfit.PlanOptions(seconds=-1))


def test_a_cost_is_on_the_scale_of_the_time_that_was_measured(model, monkeypatch):
    # GIVEN real passes that take a hundredth of what is computed
    def timed(self, plans, limit_seconds):
        return [1e-9 for _ in plans]

    monkeypatch.setattr(Subject, "time_passes", timed)
    plan = plan_for(model, 0.4, options=memfit.PlanOptions(measure=True))

    # THEN no move is said to save more time than there was
    before = plan.seconds_before.seconds
    assert all(abs(move.costs_seconds) <= 2 * max(before, plan.seconds_after.seconds) for move in plan.moves)


def test_measuring_leaves_the_model_as_it_was(model, timed_briefly):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    plan_for(model, 0.6, options=memfit.PlanOptions(measure=True))
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_states_in_8_bits_are_used_when_allowed(model):
    pytest.importorskip("bitsandbytes")
    plain = plan_for(model, 0.45, allow=("exact", "rounding"))
    narrow = plan_for(model, 0.45, allow=("8-bit-optimizer", "checkpoint", "micro-batch"))
    assert plain.keeps is not Keeps.CHANGES
    assert narrow.fits


def test_a_plan_prints_and_is_json(model):
    plan = plan_for(model, 0.5)
    assert "Stack on" in str(plan) and "budget" in str(plan)
    assert Plan.from_json(json.dumps(plan.to_json())).settings == plan.settings
    assert isinstance(plan.settings, Settings) and plan.budget_bytes > MIB / 4


def first_dtype(model, fitted):
    seen = []
    hook = model.head.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    fitted.step(classify, batch_of())
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("as_job", [False, True])
def test_autocast_that_was_asked_for_is_applied(model, as_job):
    # GIVEN a plan under autocast, asked for by argument or by the job
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"device": "cpu", "budget": "64MiB", "options": memfit.PlanOptions(measure=False)}
    if as_job:
        job = memfit.Job(model, classify, batch_of(), optimizer=optimizer, precision="amp-bf16")
        plan = memfit.plan(job, **options)
    else:
        plan = memfit.plan(model, classify, batch_of(), optimizer=optimizer, precision="amp-bf16", **options)
    narrow = memfit.estimate(model, classify, batch_of(), optimizer=optimizer, precision="amp-bf16", device="cpu")
    assert plan.before.peak_bytes == narrow.peak_bytes
    assert "autocast" not in {move.name for move in plan.moves}

    # WHEN it is applied, THEN the model computes in that width
    assert plan.settings.precision == "amp-bf16"
    with plan.apply(model, optimizer) as fitted:
        assert first_dtype(model, fitted) is torch.bfloat16


def test_another_width_of_weights_is_the_user_s_to_give(model):
    with pytest.raises(BadInput, match=r"model\.to\(torch\.bfloat16\)"):
        plan_for(model, 0.9, precision="bf16")
    assert plan_for(model.bfloat16(), 0.9, batch=(batch_of()[0].bfloat16(), batch_of()[1])).fits


@pytest.mark.parametrize("share", [2.0, 0.4])
def test_a_loss_may_come_with_its_weight(model, share):
    def weighed(model, batch):
        labels = batch[1]
        return F.cross_entropy(model(batch[0]), labels, ignore_index=3), (labels != 3).sum()

    plan = plan_for(model, share, loss=weighed, allow=("micro-batch",))
    assert plan.settings.weighting.kind == "given"
    expected, _ = weighed(model, batch_of())
    with plan.apply(model, torch.optim.AdamW(model.parameters())) as fitted:
        assert fitted.backward(weighed, batch_of()).item() == pytest.approx(expected.item(), rel=1e-5)


def test_what_changes_training_waits_until_nothing_else_fits(model):
    allow = ("exact", "rounding", "changes training", "approximate")
    assert plan_for(model, 0.9, allow=allow).keeps is not Keeps.CHANGES


def test_batches_of_other_sizes_are_split_by_the_planned_size(model):
    # GIVEN a plan of several micro-batches
    plan = plan_for(model, 0.4, allow=("micro-batch",))
    size = plan.settings.micro_batch_size
    assert plan.settings.micro_batches > 1 and size == -(-2048 // plan.settings.micro_batches)
    seen = []

    def watching(model, batch):
        seen.append(len(batch[0]))
        return classify(model, batch)

    # WHEN the last batch of an epoch is smaller, or one is larger
    with plan.apply(model, torch.optim.AdamW(model.parameters())) as fitted:
        for count in (1, 3, size + 1, 4096):
            seen.clear()
            fitted.step(watching, batch_of(count))
            # THEN every sample is used, in parts that are no larger than planned
            assert sum(seen) == count and max(seen) <= size


def test_gradients_that_were_zeroed_are_freed_as_a_move(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job = memfit.Job(model, classify, batch_of(), optimizer=optimizer, set_to_none=False)
    plan = memfit.plan(job, device="cpu", budget="64MiB", options=memfit.PlanOptions(measure=False))
    assert "set-to-none" in {move.name for move in plan.moves}


@pytest.mark.parametrize("share", [0.5, 0.4, 0.33])
def test_a_plan_is_no_slower_than_any_simple_one_that_fits(model, share):
    # GIVEN every number of parts, with nothing recomputed
    plan = plan_for(model, share)
    estimator = open_estimator(
        memfit.Job(model, classify, batch_of(), optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3)),
        plan.device,
    )
    estimator.run(eager=False)
    for parts in (2, 3, 4, 6, 8, 12, 16):
        settings = Settings(micro_batches=parts, kernels=plan.settings.kernels)
        if estimator.with_settings(settings)[0].peak_bytes <= 0.99 * plan.budget_bytes:
            # THEN the plan has no more parts than the first of them that fits
            assert plan.settings.micro_batches <= parts
            return
    raise AssertionError("none fits: the test shows nothing")


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


@torch.library.custom_op("memfit_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: 2 * gradient)


def attend(x):
    rows = x.view(-1, 2, 2, 16)
    return flex_attention(rows, rows, rows).view(x.shape)


def summed(x):
    def add(carried, rows):
        return carried + rows.sin(), carried.clone()

    return scan(add, torch.zeros_like(x), torch.stack([x, x]))[0]


PARTS = {
    "autograd function": Cubed.apply,
    "operator of torch.library": doubled,
    "checkpoint": lambda x: checkpoint(lambda y: y.sin().cos(), x, use_reentrant=False),
    "cond": lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
    "map": lambda x: map_rows(torch.sin, torch.stack([x, x]))[0],
    "scan": summed,
    "flex_attention": attend,
}


def as_it_is_estimated(model, optimizer):
    """Plans for an A100 from a figure that is the estimate's."""
    job = memfit.Job(model, classify, batch_of(), optimizer=optimizer)
    plain = memfit.estimate(job, device="a100-40gb")
    options = memfit.PlanOptions(measure=False)
    plan = memfit.plan(job, device="a100-40gb", budget=2 * plain.peak_bytes, options=options)
    assert plan.before.peak_bytes == plain.peak_bytes
    assert plan.fits


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", PARTS)
def test_steps_of_today_are_planned_from_what_is_estimated(name):
    model = nn.Sequential(nn.Linear(64, 64), Stack(depth=2))
    model[0].register_forward_hook(lambda module, args, out: PARTS[name](out))
    as_it_is_estimated(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("name", ["Adam8bit", "PagedAdamW8bit"])
def test_optimizers_of_bitsandbytes_are_planned_from_what_is_estimated(name):
    library = pytest.importorskip("bitsandbytes")
    model = Stack(depth=2)
    as_it_is_estimated(model, getattr(library.optim, name)(model.parameters()))


@pytest.mark.parametrize("name", ["Linear4bit", "Linear8bitLt"])
def test_quantized_weights_are_planned_from_what_is_estimated(name):
    library = pytest.importorskip("bitsandbytes")
    model = Stack(depth=2)
    for block in model.blocks:
        block.up = getattr(library.nn, name)(64, 256)
    trained = [weight for weight in model.parameters() if weight.requires_grad and weight.is_floating_point()]
    as_it_is_estimated(model, torch.optim.AdamW(trained))


def test_outputs_that_the_loop_keeps_are_in_the_plan():
    def mean(model, batch):
        return model(batch[0]).mean()

    def planned(**options):
        model = nn.Linear(64, 4096)
        job = memfit.Job(model, mean, batch_of(), torch.optim.SGD(model.parameters(), 0.1), **options)
        return memfit.plan(job, device="a100-40gb", budget="4GiB", options=memfit.PlanOptions(measure=False))

    # Outputs of the first step are there in the second one's backward pass.
    assert planned(keep_outputs=True).before.peak_bytes == planned().before.peak_bytes + 2048 * 4096 * 4

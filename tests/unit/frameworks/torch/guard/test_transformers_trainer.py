"""The guard of a trainer, without the library: what it decides. What it comes to is in the integration tests."""

from types import SimpleNamespace

import pytest
import torch

from memfit.core import run_events
from memfit.core.errors import BadInput
from memfit.core.settings import Weighting
from memfit.frameworks.torch.guard import transformers_trainer
from memfit.frameworks.torch.guard.transformers_trainer import TrainerGuard


def trainer_of(**changes):
    accelerator = SimpleNamespace(
        distributed_type=SimpleNamespace(name="NO"),
        sync_gradients=True,
        scaler=None,
        backward=lambda loss: loss.backward(),
        clip_grad_norm_=lambda *_: None,
        clip_grad_value_=lambda *_: None,
        unwrap_model=lambda model: model,
    )
    model = torch.nn.Linear(2, 1)
    values = {
        "accelerator": accelerator,
        "optimizer": torch.optim.SGD(model.parameters()),
        "args": SimpleNamespace(optim="adamw_torch"),
        "model": model,
        **changes,
    }
    return SimpleNamespace(**values)


class FakeGuard:
    """Runs everything as two parts."""

    def __init__(self, model, optimizer, scaler=None):
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.closed = False

    def passes(self, loss, batch, run, *, is_last, weighting):
        self.weighting = weighting
        return run(batch, 0.25) + run(batch, 0.75)

    def forget(self):
        pass

    def close(self):
        self.closed = True


def test_losses_are_weighed_where_they_go_to_the_accelerator():
    trainer = trainer_of()
    guard = TrainerGuard(trainer, FakeGuard)
    seen = []
    trainer.accelerator.backward = lambda loss: seen.append(float(loss))

    def step(model, inputs, num_items_in_batch):
        trainer.accelerator.backward(torch.tensor(8.0))
        return torch.tensor(8.0)

    guard.training_step(step, trainer.model, {"x": torch.ones(4)}, (None,), {})

    assert seen == [2.0, 6.0]


def test_a_step_that_goes_around_the_accelerator_is_refused():
    trainer = trainer_of()
    guard = TrainerGuard(trainer, FakeGuard)

    with pytest.raises(BadInput, match=r"self.accelerator.backward\(loss\)"):
        guard.training_step(lambda *_: torch.tensor(1.0), trainer.model, {"x": torch.ones(4)}, (None,), {})


@pytest.mark.parametrize(("kind", "optim"), [("DEEPSPEED", "sgd"), ("FSDP", "sgd"), ("NO", "lomo")])
def test_engines_that_do_everything_by_themselves_are_left_alone(kind, optim, caplog):
    trainer = trainer_of(args=SimpleNamespace(optim=optim))
    trainer.accelerator.distributed_type.name = kind
    guard = TrainerGuard(trainer, FakeGuard)

    for _ in range(2):
        assert guard.training_step(lambda *_: "whole", trainer.model, {}, (None,), {}) == "whole"
    assert [record.message for record in caplog.records if "is not guarded" in record.message] == [
        caplog.records[0].message
    ]


def test_another_optimizer_gets_another_guard():
    trainer = trainer_of()
    made = []
    guard = TrainerGuard(trainer, lambda *a, **k: made.append(FakeGuard(*a, **k)) or made[-1])

    def step(model, inputs, num_items_in_batch):
        loss = trainer.model.weight.sum()
        trainer.accelerator.backward(loss)
        return loss.detach()

    for _ in range(2):
        guard.training_step(step, trainer.model, {"x": torch.ones(4)}, (None,), {})
    trainer.optimizer = torch.optim.Adam(trainer.model.parameters())
    guard.training_step(step, trainer.model, {"x": torch.ones(4)}, (None,), {})

    assert len(made) == 2
    assert made[0].closed
    assert not made[1].closed


class GPT2LMHeadModel(torch.nn.Linear):
    pass


@pytest.mark.parametrize(
    ("accepts", "num_items", "labels", "expected"),
    [
        (True, 10, torch.ones(4, 3, dtype=torch.long), Weighting("sum")),
        (True, None, torch.ones(4, 3, dtype=torch.long), Weighting("count", "['labels']", -100, 1)),
        (False, 10, torch.ones(4, dtype=torch.long), Weighting()),
        (False, None, torch.ones(4, 3), Weighting()),
        (False, None, None, Weighting()),
    ],
)
def test_how_losses_add_up_is_guessed_where_it_cannot_be_tried_out(accepts, num_items, labels, expected):
    trainer = trainer_of(model_accepts_loss_kwargs=accepts, compute_loss_func=None)
    inputs = {} if labels is None else {"labels": labels}

    assert transformers_trainer._likely_weighting(trainer, GPT2LMHeadModel(1, 1), inputs, num_items) == expected


def train(resume_from_checkpoint=None, trial=None):
    return resume_from_checkpoint, trial


@pytest.fixture
def started_again(supervised, tmp_path):
    """The second attempt of a run whose first has written a checkpoint; its path."""
    written = tmp_path / "checkpoint-3"
    written.mkdir()
    supervised.attempt(1)
    run_events.note("checkpoint", path=str(written))
    supervised.attempt(2)
    return str(written)


def test_a_second_attempt_goes_on_from_the_last_checkpoint(supervised, started_again):
    guard = TrainerGuard(trainer_of(), FakeGuard)

    assert guard.train(train, (), {}) == (started_again, None)
    assert guard.train(train, (False, "trial"), {}) == (started_again, "trial")
    assert supervised.events()[0] == ("resume", {"path": started_again})


def test_what_the_script_says_about_resuming_counts(supervised, started_again):
    guard = TrainerGuard(trainer_of(), FakeGuard)

    assert guard.train(train, ("own",), {}) == ("own", None)
    assert guard.train(train, (), {"resume_from_checkpoint": True}) == (True, None)
    assert not supervised.events()


def test_a_second_attempt_without_a_checkpoint_says_that_it_begins_anew(supervised, caplog):
    supervised.attempt(1)
    supervised.attempt(2)

    assert TrainerGuard(trainer_of(), FakeGuard).train(train, (), {}) == (None, None)
    assert "Set save_steps" in caplog.text


def test_a_first_attempt_and_a_run_of_its_own_begin_as_they_are(supervised):
    guard = TrainerGuard(trainer_of(), FakeGuard)

    assert guard.train(train, (), {}) == (None, None)
    supervised.attempt(1)
    assert guard.train(train, (), {}) == (None, None)


def test_a_checkpoint_is_told_once_it_is_there(supervised, tmp_path):
    supervised.attempt(1)
    trainer = trainer_of(state=SimpleNamespace(global_step=5), _get_output_dir=lambda trial=None: str(tmp_path))
    guard = TrainerGuard(trainer, FakeGuard)

    guard.saved()
    (tmp_path / "checkpoint-5").mkdir()
    guard.saved()

    assert supervised.events() == [("checkpoint", {"step": 5, "update": 5, "path": str(tmp_path / "checkpoint-5")})]

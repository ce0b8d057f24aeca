"""Trainers of other libraries under a guard come to the weights that they come to without failures."""

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from benchmarks.guard_cases import Faults, Schedule, Transformer, largest_difference
from memfit.api.guard import Guard
from memfit.api.integrations import LibraryGuard
from memfit.core.guarding import GuardOptions
from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators
from memfit.guard.driver import Driver

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "integration_scripts"
BATCH = 8
LENGTH = 12
VOCABULARY = 24
NUM_SAMPLES = 44
"""Of an epoch: five batches and a half, so that windows of two batches end with one that isn't full."""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def ragged_samples():
    """Token sequences, and labels of unequal numbers of them."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for _ in range(NUM_SAMPLES):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        labels = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        labels[int(torch.randint(3, LENGTH, (1,), generator=generator)) :] = -100
        samples.append((tokens, labels))
    return samples


def needs(package):
    # Not imported: the libraries import a torchvision that can't be imported everywhere.
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


class Recorded:
    """How every batch was run in the end; or, played back, how it has to be run."""

    def __init__(self, monkeypatch):
        self.settings = []
        plain_update = LibraryGuard.update

        def update(guard, *arguments, **named):
            result_of = guard._driver.settings_of
            entries = list(guard._loop.transaction.entries)
            plain_update(guard, *arguments, **named)
            self.settings += [replace(result_of(entry.batch), micro_batches=entry.num_parts) for entry in entries]

        self._patch = monkeypatch
        monkeypatch.setattr(LibraryGuard, "update", update)
        self._plain_update = plain_update

    def play_back(self):
        left = iter(list(self.settings))
        self._patch.setattr(LibraryGuard, "update", self._plain_update)
        self._patch.setattr(Driver, "settings_of", lambda driver, batch: next(left))


@contextmanager
def quiet():
    """Libraries warn of what is none of our business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


SCHEDULES = (
    Schedule(3, 12, rate=0.2, phases=("forward", "backward", "update")),
    Schedule(8, 12, rate=0.2, phases=("forward", "backward", "update")),
)


# The Trainer of transformers.


@pytest.fixture(scope="module")
def transformers():
    needs("transformers")
    needs("accelerate")
    with quiet():
        define_missing_operators()
        import transformers

        # Modules are imported on demand, with warnings of their own.
        assert transformers.Trainer and transformers.GPT2LMHeadModel
    return transformers


def train_with_trainer(
    transformers, folder, *, guarded=True, faults=None, dtype=torch.float64, dropout=0.0, optimizer="adamw_torch",
    trainer=None, **options,
):  # fmt: skip
    from memfit.integrations import guard_trainer

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=VOCABULARY, n_positions=LENGTH, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, loss_type="ForCausalLM",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).to(dtype)
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=BATCH, gradient_accumulation_steps=2, num_train_epochs=2,
        report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, learning_rate=1e-2, max_grad_norm=0.5,
        use_cpu=True, optim=optimizer, log_level="error", seed=3,
    )  # fmt: skip
    data = [{"input_ids": tokens, "labels": labels} for tokens, labels in ragged_samples()]

    class Steps(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **named):
            faults.begin(state.global_step)

        def on_pre_optimizer_step(self, args, state, control, **named):
            faults.enter("update")

    trainer = (trainer or transformers.Trainer)(
        model, arguments, train_dataset=data, callbacks=[Steps()] if faults is not None else []
    )
    trainer.remove_callback(transformers.PrinterCallback)
    if guarded:
        guard_trainer(trainer, options=GuardOptions(remember=False, **options))
    with quiet(), nullcontext() if faults is None else faults:
        result = trainer.train()
    return model, result.training_loss


def test_a_guarded_trainer_is_the_same_trainer_while_memory_suffices(transformers, tmp_path):
    plain, plain_loss = train_with_trainer(transformers, tmp_path, guarded=False, dropout=0.1)
    guarded, loss = train_with_trainer(transformers, tmp_path, dropout=0.1)

    assert largest_difference(plain, guarded) == 0
    assert loss == plain_loss


@pytest.mark.parametrize("counts", [True, False], ids=["items counted", "mean of means"])
def test_micro_batches_of_a_trainer_give_the_gradient_of_the_batch(transformers, tmp_path, counts):
    class OwnLoss(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            scores = model(inputs["input_ids"]).logits
            return F.cross_entropy(scores.flatten(0, -2), inputs["labels"].flatten())

    # GIVEN the trainer's own loss, which is divided by the tokens of a window, or a mean over the tokens of a batch
    options = {"optimizer": "sgd", "trainer": None if counts else OwnLoss}
    plain, plain_loss = train_with_trainer(transformers, tmp_path, guarded=False, **options)

    for size in (3, 1):
        guarded, loss = train_with_trainer(transformers, tmp_path, micro_batch_size=size, **options)
        assert 0 < largest_difference(plain, guarded) < 1e-12
        assert loss == pytest.approx(plain_loss, rel=1e-6)


@pytest.mark.parametrize(("dtype", "schedule"), [(torch.float32, SCHEDULES[0]), (torch.float64, SCHEDULES[1])])
def test_failures_leave_no_trace_in_the_weights_of_a_trainer(transformers, tmp_path, monkeypatch, schedule, dtype):
    # GIVEN a run with dropout in which memory runs out in passes and updates
    faults = Faults(schedule)
    recorded = Recorded(monkeypatch)
    failed, loss = train_with_trainer(transformers, tmp_path, faults=faults, dtype=dtype, dropout=0.1)
    assert {phase for _, phase in faults.raised} & {"forward", "backward"}
    assert max(settings.micro_batches for settings in recorded.settings) > 1

    # WHEN the same micro-batches are run without any failure
    recorded.play_back()
    unharmed, expected_loss = train_with_trainer(transformers, tmp_path, dtype=dtype, dropout=0.1)

    # THEN weights are the same, bit by bit
    assert largest_difference(failed, unharmed) == 0
    assert loss == expected_loss


def test_an_unguarded_trainer_dies_of_the_same_failures(transformers, tmp_path):
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        train_with_trainer(transformers, tmp_path, guarded=False, faults=Faults(SCHEDULES[0]))


# Lightning.


def import_lightning(name):
    needs(name.partition(".")[0])
    with quiet():
        define_missing_operators()
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def lightning():
    return import_lightning("lightning.pytorch")


def train_with_lightning(
    lightning, *, guarded=True, faults=None, dtype=torch.float64, dropout=0.0, optimizer=torch.optim.AdamW,
    precision=None, **options,
):  # fmt: skip
    import torchmetrics

    from memfit.api import integrations

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = Transformer(dropout)
            self.metric = torchmetrics.SumMetric()
            self.epochs = []

        def training_step(self, batch, batch_idx):
            tokens, labels = batch
            loss = F.cross_entropy(self.inner(tokens).flatten(0, -2), labels.flatten())
            self.log("num_samples", float(len(tokens)), on_epoch=True, reduce_fx="sum", batch_size=len(tokens))
            self.metric.update(len(tokens))
            return {"loss": loss}

        def on_train_epoch_end(self):
            logged = self.trainer.callback_metrics["num_samples"].item()
            self.epochs.append((logged, self.metric.compute().item()))

        def configure_optimizers(self):
            own = optimizer(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(own, 0.9)
            return {"optimizer": own, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Steps(lightning.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx % 2 == 0:
                faults.begin(trainer.global_step)

        def on_before_optimizer_step(self, *_):
            faults.enter("update")

    torch.manual_seed(0)
    model = Module().to(dtype)
    guard = integrations._lightning_guard(lightning)
    callbacks = [guard(GuardOptions(remember=False, **options))] if guarded else []
    with quiet():
        trainer = lightning.Trainer(
            max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5, logger=False, accelerator="cpu",
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, precision=precision,
            callbacks=[*callbacks, *([Steps()] if faults is not None else [])],
        )  # fmt: skip
        loader = torch.utils.data.DataLoader(ragged_samples(), batch_size=BATCH)
        torch.manual_seed(5)
        with nullcontext() if faults is None else faults:
            trainer.fit(model, loader)
    return model


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_a_guarded_lightning_module_trains_the_same_while_memory_suffices(name):
    lightning = import_lightning(name)
    plain = train_with_lightning(lightning, guarded=False, dropout=0.1)
    guarded = train_with_lightning(lightning, dropout=0.1)

    assert largest_difference(plain, guarded) == 0
    assert guarded.epochs == plain.epochs == [(NUM_SAMPLES, NUM_SAMPLES), (NUM_SAMPLES, 2 * NUM_SAMPLES)]


def test_micro_batches_of_lightning_give_the_gradient_of_the_batch(lightning):
    plain = train_with_lightning(lightning, guarded=False, optimizer=torch.optim.SGD)

    for size in (3, 1):
        guarded = train_with_lightning(lightning, micro_batch_size=size, optimizer=torch.optim.SGD)
        assert 0 < largest_difference(plain, guarded) < 1e-12
        assert guarded.epochs == plain.epochs


@pytest.mark.parametrize(("precision", "schedule"), [(None, SCHEDULES[0]), ("16-mixed", SCHEDULES[1])])
def test_failures_leave_no_trace_in_the_weights_of_lightning(lightning, monkeypatch, schedule, precision):
    # GIVEN a run with dropout, with and without a gradient scaler, in which memory runs out in passes and updates
    options = {"dtype": torch.float32, "dropout": 0.1, "precision": precision}
    faults = Faults(schedule)
    recorded = Recorded(monkeypatch)
    failed = train_with_lightning(lightning, faults=faults, **options)
    assert {phase for _, phase in faults.raised} & {"forward", "backward"}
    assert max(settings.micro_batches for settings in recorded.settings) > 1

    # WHEN the same micro-batches are run without any failure
    recorded.play_back()
    unharmed = train_with_lightning(lightning, **options)

    # THEN weights are the same, bit by bit, and nothing was counted twice
    assert largest_difference(failed, unharmed) == 0
    assert failed.epochs == unharmed.epochs == [(NUM_SAMPLES, NUM_SAMPLES), (NUM_SAMPLES, 2 * NUM_SAMPLES)]


def test_an_unguarded_lightning_module_dies_of_the_same_failures(lightning):
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        train_with_lightning(lightning, guarded=False, faults=Faults(SCHEDULES[0]))


# accelerate.


def accelerated(**options):
    needs("accelerate")
    with quiet():
        define_missing_operators()
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, **options)
        model = Transformer(0.0).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        loader = torch.utils.data.DataLoader(ragged_samples(), batch_size=BATCH)
        return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def token_loss(model, batch):
    tokens, labels = batch
    return F.cross_entropy(model(tokens).flatten(0, -2), labels.flatten())


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_guard_takes_what_accelerate_has_prepared(accumulate):
    # GIVEN the loop of accelerate's documentation
    accelerator, model, optimizer, loader, scheduler = accelerated(gradient_accumulation_steps=accumulate)
    num_updates = 0
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                # Every batch of a window weighs the same there.
                accelerator.backward(token_loss(model, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    num_updates += 1
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    rates = scheduler.get_last_lr()

    # WHEN the same objects are given to a guard, under which memory runs out
    _, guarded, optimizer, loader, scheduler = accelerated()
    faults = Faults(Schedule(4, 12, rate=0.1, phases=("forward", "backward")))

    def even_loss(model, batch):
        return token_loss(model, batch) if accumulate == 1 else (token_loss(model, batch), 1.0)

    options = {} if accumulate == 1 else {"accumulate": accumulate}
    with Guard(
        guarded,
        optimizer,
        scheduler=scheduler,
        clip_norm=0.5,
        plan=None,
        options=GuardOptions(remember=False),
        **options,
    ) as guard:
        step = 0
        for _ in range(2):
            for batch in guard.batches(loader):
                if accumulate == 1:
                    faults.begin(step)
                with faults:
                    guard.step(even_loss, batch)
                step += 1

    # THEN it comes to the same weights and learning rates; accelerate leaves a last window that isn't full without
    # its division by what it holds, so that is compared where windows are full
    assert guard.num_updates == num_updates
    assert scheduler.get_last_lr() == rates
    if accumulate == 1:
        assert faults.raised
        assert 0 < largest_difference(model, guarded) < 1e-12


def test_the_scaler_of_an_accelerator_is_used():
    _, model, optimizer, _, _ = accelerated()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.scaler = scaler

    with Guard(model, optimizer, plan=None, options=GuardOptions(remember=False)) as guard:
        assert guard._loop.optimizer is optimizer.optimizer
        assert guard._loop.transaction.scaler is scaler


# Real limits.


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_DATA")
@pytest.mark.parametrize(
    "script", ["trainer_under_limit.py", pytest.param("lightning_under_limit.py", marks=pytest.mark.slow)]
)
def test_a_training_that_dies_under_a_real_limit_is_finished_by_the_guard(script, tmp_path):
    needs("transformers" if script.startswith("trainer") else "lightning")
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1",
        # What was freed goes back to the system, so that the limit is what it says.
        "MEMFIT_CACHE": str(tmp_path), "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script)], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    result = json.loads(done.stdout.splitlines()[-1])

    assert "can't allocate memory" in result["plain under the limit"]
    assert result["guarded under the limit"] == pytest.approx(result["plain"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["trainer_on_two_ranks.py", "lightning_on_two_ranks.py"])
def test_one_process_of_several_that_runs_out_of_memory_makes_all_replay(script, tmp_path):
    needs("transformers" if script.startswith("trainer") else "lightning")
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPTS / script)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]

    assert len(answers) == 2
    assert sum(answer["failures"] for answer in answers) >= 2
    for answer in answers:
        assert answer["without failures"] < 1e-13
        assert 0 < answer["with failures"] < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("library", ["trainer", "lightning"])
def test_a_script_without_edits_is_guarded_and_resumed_under_memfit_run(library, tmp_path):
    needs("transformers" if library == "trainer" else "lightning")
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1",
        "MEMFIT_CACHE": str(tmp_path),
    }  # fmt: skip

    def run(folder, *arguments):
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-m", "memfit", "run", str(SCRIPTS / f"unedited_{library}.py"), *arguments],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return next(line for line in done.stdout.splitlines() if line.startswith("finished")), done.stderr

    # GIVEN a script that runs to its end, and the same one, which memory ends once outside of a step
    whole, _ = run(tmp_path / "whole")
    resumed, shown = run(tmp_path / "resumed", "--fail")

    # THEN it is started again from the library's own last checkpoint, and comes to the same weights, to the rounding of
    # the smaller micro-batches that it is told to use
    assert "guarded" in whole
    assert "from the checkpoint" in shown
    *words, expected = whole.split()
    assert resumed.split()[:-1] == words
    assert float(resumed.split()[-1]) == pytest.approx(float(expected), rel=1e-6)

"""Plans for unmodified training scripts of several styles, proven by runs with the plan's moves in force.

Where a script has arguments of its own for what a plan does, such as smaller batches and accumulation, a dry run with
those arguments must need what the plan says.
"""

import importlib.util
from pathlib import Path

import pytest

from memfit import DryRunOptions, PlanOptions, dryrun, plan_script

SCRIPTS = Path(__file__).parent / "scripts"
DEVICE = "a100-40gb"
GPT = "--n-layer 6 --n-head 6 --n-embd 384 --block-size 512 --batch-size 16 --vocab-size 4000 --dtype float32"
HF = "--hidden-size 384 --num-layers 6 --num-heads 6 --max-length 256 --min-length 256 --vocab-size 8000"
VIT = "--model vit_small_patch16_224 --img-size 224 --opt adamw --train-size 256 --val-size 16"
LIGHTNING = "--batch-size 256 --image-size 64 --width 64 --train-size 1024 --val-size 64"

# What is computed before it is proven may be so much below or above the truth.
LOWEST, HIGHEST = 0.88, 1.15


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Scripts write into the working folder; what they print is not for the test's own output."""
    monkeypatch.chdir(tmp_path)


def needs(library):
    return pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"{library} is not installed")


def peak_of(script, arguments):
    quiet = DryRunOptions(quiet_output=True)
    return dryrun(SCRIPTS / script, arguments.split(), device=DEVICE, options=quiet).estimate.peak_bytes


def planned(script, arguments, share, **options):
    budget = int(peak_of(script, arguments) * share)
    quiet = PlanOptions(quiet_output=True)
    plan = plan_script(SCRIPTS / script, arguments.split(), device=DEVICE, budget=budget, options=quiet, **options)
    assert plan.fits
    return plan


def test_a_plain_loop_recomputes_as_few_blocks_as_it_takes():
    plan = planned("gpt_trainer.py", GPT, 0.75, allow=["exact"])

    chosen = plan.settings.checkpoint
    assert 0 < len(chosen) < 6
    assert all(path.startswith("transformer.h.") for path in chosen)
    assert [point.settings for point in plan.front if point.verified] == [plan.settings]
    (move,) = [move for move in plan.moves if move.name == "checkpoint"]
    assert move.saves_bytes > 0
    assert move.costs_seconds > 0


@pytest.mark.slow
def test_what_is_computed_for_a_loop_of_its_own_is_what_its_arguments_do():
    plan = planned("gpt_trainer.py", GPT, 0.6)

    # The loop fetches its batches itself, so that nothing could be proven.
    count = plan.settings.micro_batches
    assert count > 1
    assert not any(point.verified for point in plan.front)
    smaller = GPT.replace("--batch-size 16", f"--batch-size {16 // count}")
    truth = peak_of("gpt_trainer.py", f"{smaller} --gradient-accumulation-steps {2 * count}")
    assert LOWEST <= plan.after.peak_bytes / truth <= HIGHEST


@pytest.mark.slow
@needs("transformers")
def test_micro_batches_of_the_trainer_are_what_its_arguments_do():
    arguments = f"{HF} --batch-size 32 --train-size 256"
    plan = planned("hf_trainer.py", arguments, 0.7)

    count = plan.settings.micro_batches
    assert count > 1
    assert [point.settings for point in plan.front if point.verified] == [plan.settings]
    # Evaluation goes on with whole batches in a plan, and with smaller ones by the arguments.
    smaller = arguments.replace("--batch-size 32", f"--batch-size {32 // count}")
    truth = peak_of("hf_trainer.py", f"{smaller} --gradient-accumulation-steps {count}")
    assert 0.97 * truth <= plan.after.peak_bytes


@pytest.mark.slow
@needs("timm")
def test_micro_batches_of_timm_are_what_its_arguments_do():
    plan = planned("timm_train.py", f"{VIT} -b 64", 0.7)

    count = plan.settings.micro_batches
    assert count > 1
    truth = peak_of("timm_train.py", f"{VIT} -b {64 // count} --grad-accum-steps {count}")
    assert plan.after.peak_bytes == pytest.approx(truth, rel=0.03)


@pytest.mark.slow
@needs("timm")
def test_timm_recomputes_some_of_its_blocks():
    plan = planned("timm_train.py", f"{VIT} -b 64", 0.7, allow=["exact"])

    assert 0 < len(plan.settings.checkpoint) < 12


@pytest.mark.slow
@needs("lightning")
def test_lightning_under_autocast_is_what_its_arguments_do():
    plan = planned("lightning_module.py", LIGHTNING, 0.8, precision="auto")

    assert plan.settings.precision == "amp-bf16"
    if not plan.settings.checkpoint:
        truth = peak_of("lightning_module.py", f"{LIGHTNING} --precision bf16-mixed")
        assert plan.after.peak_bytes <= 1.05 * truth

"""Every example runs as its README says, in a process of its own, and says what it is there to say."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path for path in EXAMPLES.glob("*/*.py"))


def start(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def run(*arguments: str, expected: int = 0) -> str:
    done = start(*arguments)
    assert done.returncode == expected, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def dry_run(script: str, *options: str, folder: Path, expected: int = 0) -> tuple[str, str]:
    """What a dry run of an example writes to standard output and standard error, in a folder that it may write to."""
    done = start("-m", "memfit", "dryrun", *options, str(ROOT / script), folder=folder)
    assert done.returncode == expected, done.stderr
    return done.stdout, done.stderr


def peak_gib(shown: str) -> float:
    return float(re.search(r"needed on the device +([\d.]+) GiB", shown)[1])


def needs(*packages: str) -> None:
    # Not imported: memfit can load a torchvision that a plain import can't.
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def test_every_folder_has_a_readme_that_names_its_script():
    assert SCRIPTS, "no examples found: the check would pass on nothing"
    for script in SCRIPTS:
        readme = script.with_name("README.md").read_text(encoding="utf-8")
        assert str(script.relative_to(ROOT)) in readme


def test_every_example_is_listed_in_the_documentation_and_tested_here():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    here = Path(__file__).read_text(encoding="utf-8")
    for folder in {script.parent.name for script in SCRIPTS}:
        assert f"examples/{folder}/README.md" in index
        assert f'"examples/{folder}/' in here


def test_demo_tells_the_whole_story(tmp_path):
    shown = run("examples/demo/demo.py", str(tmp_path / "pages"))

    assert "It died, exit code 1: RuntimeError" in shown
    planned = re.search(r"^([\d.]+) MiB -> ([\d.]+) MiB of ([\d.]+) MiB: ", shown, re.MULTILINE)
    before, after, budget = map(float, planned.groups())
    assert after <= budget < before
    assert "the same, bit by bit" in shown
    assert "│ yes " in shown
    assert "│ no " in shown
    for name in ("estimate", "plan", "run"):
        page = tmp_path / "pages" / f"{name}.html"
        assert str(page) in shown.replace("\n", "")
        assert page.read_text(encoding="utf-8").startswith("<!")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of data are Linux's")
def test_a_plain_loop_is_rescued():
    free = run("examples/rescue/train.py")
    rescued = run("examples/rescue/rescued.py", "150")

    losses = [line for line in free.splitlines() if line.startswith(("step", "sum"))]
    assert len(losses) == 4
    assert losses == [line for line in rescued.splitlines() if line.startswith(("step", "sum"))]


def test_estimate_python_prints_and_writes_a_page(tmp_path):
    page = tmp_path / "page.html"

    shown = run("examples/estimate_python/estimate.py", str(page))

    assert "usable on NVIDIA GeForce RTX 3060: fits" in shown
    assert "estimate.py:" in shown, "no source line of the example itself"
    assert page.is_file()


def test_job_file_trains():
    shown = run("examples/job_file/train.py", "--steps", "2")

    assert re.findall(r"^step (\d): loss \d", shown, re.MULTILINE) == ["1", "2"]


def test_job_file_is_a_target():
    shown = run("-m", "memfit", "estimate", "examples/job_file/train.py:job", "--device", "rtx-3060")

    assert "fits" in shown
    assert "4 loader workers" in shown


def test_job_file_says_by_its_exit_code_that_it_does_not_fit():
    job = "examples/job_file/train.py:job"
    shown = run("-m", "memfit", "estimate", job, "--device", "1GiB", "-b", "4096", expected=3)

    assert "does not fit" in shown


def test_max_batch_uses_more_with_autocast():
    needs("torchvision")
    shown = run("examples/max_batch/max_batch.py")

    found = {
        precision: int(size) for precision, size in re.findall(r"^(\S+): (\d+) images are safe", shown, re.MULTILINE)
    }
    even = [int(size) for size in re.findall(r"multiple of 8: (\d+)", shown)]
    assert found["amp-fp16"] > found["fp32"]
    assert [size % 8 for size in even] == [0, 0]
    assert all(size - 8 < rounded <= size for size, rounded in zip(found.values(), even, strict=True))


def test_compare_models_shows_the_saving():
    needs("torchvision", "transformers")
    shown = run("examples/compare_models/compare_models.py")

    changes = dict(re.findall(r"^  (\S.*?) {2,}.*GiB +([+-]\d+)%$", shown, re.MULTILINE))
    assert int(changes["torchvision:mobilenet_v3_large"]) < 0
    assert int(changes["hf:DistilBertForSequenceClassification"]) < 0
    # Fewer parameters, but one more output to keep per layer.
    assert int(changes["depthwise separable"]) > 0


def test_big_model_takes_no_memory_for_its_weights():
    needs("transformers")
    shown = run("examples/big_model/big_model.py")

    assert "8.0 billion parameters" in shown
    used = float(re.search(r"this process used ([\d.]+) GiB", shown)[1])
    assert used < 4, "weights were allocated"


def test_host_memory_grows_with_workers():
    needs("torchvision")
    shown = run("examples/host_memory/host_memory.py")

    totals = [float(size) for size in re.findall(r"workers.*?: ([\d.]+) GiB, ", shown)]
    assert len(totals) == 4
    assert totals == sorted(totals)


def test_dryrun_fits_on_one_device(tmp_path):
    shown, errors = dry_run("examples/dryrun/train.py", "--device", "rtx-3090", folder=tmp_path)

    assert "NVIDIA GeForce RTX 3090: ran 3 steps" in shown
    assert re.search(r"of 23.7 GiB:\s+fits$", shown, re.MULTILINE)
    # The script's own evaluation, checkpoint and training step have run, and its checkpoint is not here.
    assert shown.index("step 0: accuracy") < shown.index("step 0: loss")
    assert "classifier.pt\n  They were not kept" in shown
    assert not list(tmp_path.iterdir())
    assert "Traceback" not in errors


@pytest.mark.slow
def test_dryrun_does_not_fit_on_a_smaller_one(tmp_path):
    script = "examples/dryrun/train.py"
    shown, errors = dry_run(script, "--device", "rtx-3060", "--html", "memory.html", folder=tmp_path, expected=3)

    assert "would run out of memory on NVIDIA GeForce RTX 3060" in shown
    line = re.search(r"^  train.py:(\d+)  (.+)$", shown, re.MULTILINE)
    assert (ROOT / script).read_text(encoding="utf-8").splitlines()[int(line[1]) - 1].strip() == line[2].strip()
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate" in errors
    assert [number for number in "123" if f"\n  {number}. " in shown] == ["1", "2", "3"]
    assert [path.name for path in tmp_path.iterdir()] == ["memory.html"]


def test_dryrun_trains_for_real(tmp_path):
    script = str(ROOT / "examples/dryrun/train.py")
    small = ("--batch-size", "4", "--image-size", "32", "--width", "8", "--workers", "0")

    done = start(script, *small, "--steps", "2", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert re.search(r"^step 0: loss \d", done.stdout, re.MULTILINE)
    assert (tmp_path / "classifier.pt").is_file()


def test_longest_batch_does_not_fit_though_the_first_does(tmp_path):
    options = ("--device", "rtx-3060", "--scan", "200")

    shown, _ = dry_run("examples/longest_batch/train.py", *options, folder=tmp_path, expected=3)

    words = " ".join(shown.split())
    found = re.search(r"fits at step 1; the longest batch, ([\d,]+) tokens at index ([\d,]+), does not", words)
    tokens, index = (int(group.replace(",", "")) for group in found.groups())
    first = int(re.search(r"step 0: loss .*, (\d+) tokens", shown)[1])
    assert tokens > 2 * first
    assert 3 <= index < 200, "a run of three steps would have met it"


def test_simulate_halves_the_batch_until_it_fits():
    shown = run("examples/simulate/simulate.py")

    assert re.findall(r"^batch (\d+): CUDA out of memory", shown, re.MULTILINE) == ["64", "32"]
    found = re.search(r"^batch 16: ([\d.]+) GiB allocated, ([\d.]+) GiB reserved$", shown, re.MULTILINE)
    allocated, reserved = map(float, found.groups())
    assert 0 < allocated <= reserved < 11.8
    assert len(re.findall(r"^out of memory at simulate.py:\d+", shown, re.MULTILINE)) == 2
    assert shown.endswith("weights on cpu, as before: True\n")


def test_plan_trains_within_its_budget(tmp_path):
    shown = run("examples/plan/plan.py", "60MiB", str(tmp_path))

    before, after = map(float, re.search(r": ([\d.]+) MiB -> ([\d.]+) MiB \(simulated\), budget", shown).groups())
    assert after <= 60 < before
    losses = [re.findall(r"\d\.\d+", line) for line in re.findall(r"^as .*: loss (.*), ", shown, re.MULTILINE)]
    planned, plain = ([float(value) for value in found] for found in losses)
    assert planned == pytest.approx(plain, abs=2e-4), "the plan changes training"
    assert planned[-1] < planned[0], "nothing is learned"
    assert (tmp_path / "plan.json").is_file()


@pytest.mark.slow
def test_plan_says_what_the_smallest_needs(tmp_path):
    done = start("examples/plan/plan.py", "10MiB", str(tmp_path))

    assert done.returncode == 1
    assert done.stderr.startswith("no plan fits `LanguageModel` into 10.0 MiB; the smallest needs ")
    assert not list(tmp_path.iterdir())


def plan_script(*options: str, folder: Path) -> str:
    script = str(ROOT / "examples/plan_script/train.py")
    done = start("-m", "memfit", "plan", "--device", "rtx-3060", *options, "--script", script, folder=folder)
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())
    return " ".join(done.stdout.split())


@pytest.mark.slow
def test_plan_script_fits_with_autocast_and_micro_batches(tmp_path):
    shown = plan_script("--precision", "auto", folder=tmp_path)

    before, after = map(float, re.search(r": ([\d.]+) GiB -> ([\d.]+) GiB \(simulated\), budget 11.8", shown).groups())
    assert after < 11.8 < before
    assert "autocast to bf16" in shown
    assert "proven: the script was run with all of these moves in force" in shown


def test_plan_script_fits_with_the_same_gradients(tmp_path):
    shown = plan_script("--allow", "exact", folder=tmp_path)

    assert "gradients and updates are identical to those of the step as it is" in shown
    assert re.search(r"recompute \d+ modules", shown)
    assert "micro-batches" not in shown


def test_plan_script_trains_for_real(tmp_path):
    small = ("--width", "64", "--depth", "1", "--length", "16", "--batch-size", "2", "--steps", "1")

    done = start(str(ROOT / "examples/plan_script/train.py"), *small, folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert re.search(r"^step 0: loss \d", done.stdout, re.MULTILINE)


def guard_under_a_limit(limit_mib: int, expected: int) -> tuple[str, str, str]:
    """What examples/guard shows of the plain loop under a limit, of the guarded one, and of the one without a limit."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the limit is Linux's")
    shown = run("examples/guard/train.py", str(limit_mib), expected=expected)
    plain, _, rest = shown.partition("the same loop with a guard")
    guarded, _, free = rest.partition("the plain loop with as much memory as there is")
    return plain, guarded, free


def test_guard_finishes_where_a_plain_loop_dies():
    plain, guarded, free = guard_under_a_limit(120, expected=0)

    assert "can't allocate memory" in plain
    steps = re.findall(r"^  step (\d): loss ([\d.]+), (\d+) micro-batches, .*retries: (\d+)$", guarded, re.MULTILINE)
    assert [int(step) for step, *_ in steps] == [0, 1, 2, 3]
    assert 1 <= int(steps[0][3]) <= 3
    assert all(int(parts) > 1 for *_, parts, _ in steps)
    losses = [float(value) for _, value, *_ in steps]
    assert losses == pytest.approx(
        [float(value) for value in re.findall(r"loss ([\d.]+)$", free, re.MULTILINE)], abs=1e-3
    )
    assert losses[-1] < losses[0], "nothing is learned"


@pytest.mark.slow
def test_guard_says_what_is_needed_where_nothing_is_left():
    _, guarded, free = guard_under_a_limit(3, expected=3)

    assert "memory ran out on the host" in guarded
    assert re.search(r"nothing is left to try after micro-batches of 1 with \d modules recomputed", guarded)
    assert re.search(r"limit of this process +[\d.]+ MiB", guarded)
    assert not free


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of data are Linux's")
def test_a_stream_trains_where_loading_fails_and_goes_on_with_other_workers():
    shown = run("examples/stream/train.py")

    assert "MemoryError: Unable to allocate 256. MiB" in shown
    first, _, rest = shown.partition("the same again, now with 2 workers:")
    assert "killed after step 220" in first
    # Checkpoints are written in the background, so that the last one may not have been whole.
    assert re.match(r"\n  goes on after step (64|128|192)\n", rest)
    assert rest.endswith("the same losses: True\n")
    losses = [float(value) for value in re.findall(r": loss ([\d.]+)$", rest, re.MULTILINE)][-8:]
    assert losses[-1] < losses[0] - 0.5, "nothing is learned"


def test_a_keras_model_is_estimated(monkeypatch):
    needs("keras")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    shown = run("examples/keras/estimate.py")

    assert "small_network: training, batch size 64" in shown
    assert re.search(r"^  norm +\d", shown, re.MULTILINE)
    assert int(re.search(r"Keras on torch: the largest batch that fits is (\d+)", shown)[1]) > 64


def test_a_keras_model_is_planned(monkeypatch):
    needs("keras")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    shown = run("examples/keras_plan/keras_plan.py")

    assert re.search(r"fits", shown)
    assert shown.rstrip().endswith("fit finished: True")


@pytest.mark.slow
def test_a_fit_of_keras_goes_on_where_it_was_ended(monkeypatch, tmp_path):
    needs("keras")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    whole = run("examples/keras_fit/train.py", str(tmp_path / "whole"))
    run("examples/keras_fit/train.py", str(tmp_path / "ended"), "33", expected=9)
    resumed = run("examples/keras_fit/train.py", str(tmp_path / "ended"))

    assert len(re.findall(r"^epoch \d: loss [\d.]+$", whole, re.MULTILINE)) == 3
    assert resumed == whole


def test_what_a_keras_script_needs_is_told_without_training(monkeypatch):
    needs("keras", "jax")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    shown = run("-m", "memfit", "dryrun", "examples/keras_run/train.py")

    assert float(re.search(r"peak ([\d.]+) GiB of", shown)[1]) > 1
    assert "conv7" in shown


def test_a_step_of_jax_is_estimated():
    needs("jax", "optax")
    shown = run("examples/jax/estimate.py")

    assert "layer5" in shown
    assert float(re.search(r"the step needs ([\d.]+) MiB less", shown)[1]) > 10


def test_a_step_of_jax_is_planned():
    needs("jax", "optax")
    shown = run("examples/jax_plan/jax_plan.py")

    assert "micro-batches" in shown
    assert shown.rstrip().endswith("the loss falls: True")


def test_keras_learns_from_one_file_and_is_tested_on_another(monkeypatch):
    needs("keras", "h5py", "pyarrow")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    shown = run("examples/stream_keras/train.py")

    assert "classes of the test file: ash, birch, cedar, dogwood" in shown
    assert float(re.search(r"accuracy on the test file: ([\d.]+)%", shown)[1]) > 90


def test_a_fit_of_keras_goes_on_where_it_was(monkeypatch, tmp_path):
    needs("keras")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    assert run("examples/keras_fit/train.py", str(tmp_path), "33", expected=9) == "ended in the middle\n"
    shown = run("examples/keras_fit/train.py", str(tmp_path))

    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", shown)]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)


def test_a_conversion_halves_the_file_and_says_what_it_did_to_the_numbers(tmp_path):
    shown = run("examples/convert/convert.py", str(tmp_path))

    assert re.search(r"float64 +float32 .* 5\.96e-08 ", shown)
    assert "50% saved" in shown
    assert re.search(r"of a plain read \(measured\)", shown)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.npy", "train.npy"]


def test_search_takes_no_more_memory_for_more_trials(tmp_path):
    first = run("examples/search/search.py", "3", str(tmp_path))
    shown = run("examples/search/search.py", "6", str(tmp_path))

    rows = [line.split()[:4] for line in shown.splitlines() if re.match(r" +\d+ ", line)]
    assert len(rows) == 6
    assert all(" ".join(row) in " ".join(first.split()) for row in rows[:3]), "finished trials were run again"
    searched, kept = re.findall(r"after the first trial (\d+) MiB, after the last (\d+) MiB", shown)
    # The last one's parameters are read back; what a loop keeps is five more models.
    assert int(kept[1]) - int(kept[0]) > max(0, int(searched[1]) - int(searched[0])) + 10
    best, loaded = re.search(r"lowest score (\S+) in trial", shown)[1], re.search(r"loaded: score (\S+)", shown)[1]
    assert best == loaded
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_ensemble_takes_the_memory_of_one_member(tmp_path):
    shown = run("examples/ensemble/ensemble.py", "5", str(tmp_path))

    one, within, all_of_them = map(float, re.findall(r": +([\d.]+) MiB more than before", shown))
    assert max(one, within) < all_of_them
    assert [float(found) for found in re.findall(r"largest difference .*: (\S+)", shown)] == pytest.approx(
        [0, 0], abs=1e-6
    )


@pytest.mark.slow
def test_dryrun_distributed_fits_on_four_devices(tmp_path):
    options = ("--device", "rtx-3090", "--count", "4")

    shown, _ = dry_run("examples/dryrun_distributed/train.py", *options, folder=tmp_path)

    assert "4 x NVIDIA GeForce RTX 3090: ran 3 steps" in " ".join(shown.split())
    assert "all figures are those of one device" in shown
    # A quarter of the parameters and of two states, 3.7 GiB, beside the activations; no whole parameters in the update.
    assert 8 < peak_gib(shown) < 14


def test_dryrun_distributed_does_not_fit_on_one(tmp_path):
    script = "examples/dryrun_distributed/train.py"

    shown, _ = dry_run(script, "--device", "rtx-3090", "--steps", "1", folder=tmp_path, expected=3)

    assert "would run out of memory on NVIDIA GeForce RTX 3090" in shown
    # Parameters, gradients, two states and the update's temporaries: five times 5.0 GiB.
    assert 25 < peak_gib(shown) < 32


# Their libraries import a torchvision that can't be imported everywhere without these.
WITH_OPERATORS = (
    "-c",
    "import runpy, sys; from memfit.adapters.torch.torchvision_operators import define_missing_operators as define; "
    "define(); sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')",
)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_DATA")
@pytest.mark.parametrize(
    ("package", "script"),
    [("transformers", "examples/hf_trainer/train.py"), ("lightning", "examples/lightning/train.py")],
)
def test_a_trainer_finishes_with_too_little_memory(package, script, tmp_path, monkeypatch):
    needs(package)
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    guarded = start(*WITH_OPERATORS, script)
    plain = start(*WITH_OPERATORS, script, "--plain")
    enough = start(*WITH_OPERATORS, script, "--plain", "--memory", "1GiB")

    assert guarded.returncode == 0, guarded.stderr
    assert "memory ran out; going on with" in guarded.stderr
    assert "can't allocate memory" in plain.stderr
    assert plain.returncode == 1
    assert guarded.stdout.splitlines()[-1] == enough.stdout.splitlines()[-1]

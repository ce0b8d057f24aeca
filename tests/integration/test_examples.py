"""Every example runs as its README says, in a process of its own, and says what it is there to say."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.commands import main

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
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
    index = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    here = Path(__file__).read_text(encoding="utf-8")
    for script in SCRIPTS:
        assert f"examples/{script.parent.name}/README.md" in index
        # A module that only another script of its folder imports is run with it.
        imported = any(f"import {script.stem}\n" in other.read_text(encoding="utf-8") for other in SCRIPTS)
        assert imported or f'"{script.relative_to(ROOT)}' in here, f"{script} is not run"


def test_there_are_at_most_twelve_examples():
    assert len({script.parent for script in SCRIPTS}) <= 12


def shown_in(page: Path, command: str) -> str:
    """The block of output that a page shows for a command, without the command and the marks of what was cut."""
    blocks = load_refresh_script().OUTPUT.finditer(page.read_text(encoding="utf-8"))
    block = next(block for block in blocks if block["command"] == command)
    return block["shown"].partition("\n")[2].removeprefix("...\n").removesuffix("...\n")


def load_refresh_script():
    spec = importlib.util.spec_from_file_location("refresh_readme", ROOT / "scripts" / "refresh_readme.py")
    module = sys.modules["refresh_readme"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words_of(text: str) -> str:
    """The words without what differs from machine to machine: figures, bars, operators, the width of lines."""
    masked = re.sub(r"[█─-]{2,}|aten\.\w+|\b[0-9a-f]{16}\b|[-+]?\d[\d.,:e+-]*", " ", text)
    return f" {' '.join(masked.split())} "


def assert_fresh(page: Path, command: str, output: str) -> None:
    """What the page shows for the command is part of what it prints now, but for figures."""
    assert words_of(shown_in(page, command)) in words_of(output), f"run `python scripts/refresh_readme.py {page}`"


def test_stale_output_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- output: memfit x -->\n```text\n$ memfit x\nstep 1: loss 2.5\n```\n")

    assert_fresh(page, "memfit x", "step 1: loss 2.4999\nmore\n")
    with pytest.raises(AssertionError, match="refresh_readme"):
        assert_fresh(page, "memfit x", "update 1: loss 2.4999\n")


@pytest.mark.parametrize(
    "command",
    [
        "memfit estimate timm:resnet50 --batch-size 64 --device t4 --precision amp-fp16",
        "memfit plan timm:resnet50 --batch-size 512 --device t4 --precision amp-fp16",
    ],
)
def test_a_model_by_name_is_answered_as_the_readme_says(command, monkeypatch, capsys):
    needs("timm")
    # As wide as `scripts/refresh_readme.py` has it: cells wrap at other words in another width.
    monkeypatch.setenv("COLUMNS", "110")
    assert main(command.split()[1:]) == 0
    assert_fresh(README, command, capsys.readouterr().out)


def test_every_output_of_the_readme_is_compared_with_that_of_today():
    commands = [block["command"] for block in load_refresh_script().OUTPUT.finditer(README.read_text(encoding="utf-8"))]

    assert commands
    here = Path(__file__).read_text(encoding="utf-8")
    assert [command for command in commands if f'"{command}"' not in here] == []


def test_demo_tells_the_whole_story(tmp_path):
    shown = run("examples/demo/demo.py", str(tmp_path / "pages"))

    assert "It died, exit code 1: RuntimeError" in shown
    planned = re.search(r"^([\d.]+) MiB -> ([\d.]+) MiB of ([\d.]+) MiB: ", shown, re.MULTILINE)
    before, after, budget = map(float, planned.groups())
    assert after <= budget < before
    assert "saved activations move to files" in shown
    assert "the same, bit by bit" in shown
    assert "│ yes " in shown
    assert "│ no " in shown
    for name in ("estimate", "plan", "run"):
        page = tmp_path / "pages" / f"{name}.html"
        assert str(page) in shown.replace("\n", "")
        assert page.read_text(encoding="utf-8").startswith("<!")
    assert_fresh(README, "make demo", shown)


def test_will_it_fit_answers_every_question(tmp_path):
    page = tmp_path / "page.html"

    shown = run("examples/will_it_fit/will_it_fit.py", str(page))

    assert "usable on NVIDIA GeForce RTX 3060: fits" in shown
    assert "train.py:" in shown, "no source line of the example itself"
    assert page.is_file()
    largest = {name: int(size) for name, size in re.findall(r"^  (\S+): (\d+) fits with 95%", shown, re.MULTILINE)}
    even = int(re.search(r"multiples of 8: (\d+)", shown)[1])
    assert largest["amp-bf16"] > largest["fp32"]
    assert even % 8 == 0
    assert largest["amp-bf16"] - 8 < even <= largest["amp-bf16"]
    totals = [float(size) for size in re.findall(r"workers: ([\d.]+) GiB", shown)]
    assert len(totals) == 3
    assert totals == sorted(totals)


def test_a_job_file_trains():
    shown = run("examples/will_it_fit/train.py", "--steps", "1")

    assert re.findall(r"^step (\d): loss \d", shown, re.MULTILINE) == ["1"]


@pytest.mark.slow
def test_a_job_file_says_by_its_exit_code_that_it_does_not_fit():
    job = "examples/will_it_fit/train.py:job"
    shown = run("-m", "memfit", "estimate", job, "--device", "2GiB", "-b", "64", expected=3)

    assert "does not fit" in shown
    assert "4 loader workers" in shown


def test_choose_a_model_shows_savings_and_takes_no_memory_for_weights():
    needs("torchvision", "transformers")
    shown = run("examples/choose_a_model/choose_a_model.py")

    changes = dict(re.findall(r"^  (\S.*?) {2,}.*GiB +([+-]\d+)%$", shown, re.MULTILINE))
    assert int(changes["torchvision:mobilenet_v3_large"]) < 0
    assert int(changes["hf:DistilBertForSequenceClassification"]) < 0
    # Fewer parameters, but one more output to keep per layer.
    assert int(changes["depthwise separable"]) > 0
    assert "8.0 billion parameters" in shown
    used = float(re.search(r"this process used ([\d.]+) GiB", shown)[1])
    assert used < 4, "weights were allocated"


def test_dryrun_says_where_a_script_runs_out(tmp_path):
    script = "examples/dryrun/train.py"
    shown, errors = dry_run(script, "--device", "rtx-3060", "--html", "memory.html", folder=tmp_path, expected=3)

    assert "would run out of memory on NVIDIA GeForce RTX 3060" in shown
    line = re.search(r"^  train.py:(\d+)  (.+)$", shown, re.MULTILINE)
    assert (ROOT / script).read_text(encoding="utf-8").splitlines()[int(line[1]) - 1].strip() == line[2].strip()
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate" in errors
    assert [number for number in "123" if f"\n  {number}. " in shown] == ["1", "2", "3"]
    # The script's own checkpoint is not here.
    assert [path.name for path in tmp_path.iterdir()] == ["memory.html"]
    command = "memfit dryrun --device rtx-3060 examples/dryrun/train.py"
    assert_fresh(README, command, shown.replace(f"{ROOT}{os.sep}", ""))


@pytest.mark.slow
def test_dryrun_fits_on_a_larger_device(tmp_path):
    shown, errors = dry_run("examples/dryrun/train.py", "--device", "rtx-3090", folder=tmp_path)

    assert "NVIDIA GeForce RTX 3090: ran 3 steps" in shown
    assert re.search(r"of 23.7 GiB:\s+fits\s+\(99%\)$", shown, re.MULTILINE)
    # The script's own evaluation, checkpoint and training step have run.
    assert shown.index("step 0: accuracy") < shown.index("step 0: loss")
    assert "classifier.pt\n  They were not kept" in shown
    assert not list(tmp_path.iterdir())
    assert "Traceback" not in errors


def test_dryrun_trains_for_real(tmp_path):
    script = str(ROOT / "examples/dryrun/train.py")
    small = ("--batch-size", "4", "--image-size", "32", "--width", "8", "--workers", "0")

    done = start(script, *small, "--steps", "2", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert re.search(r"^step 0: loss \d", done.stdout, re.MULTILINE)
    assert (tmp_path / "classifier.pt").is_file()


@pytest.mark.slow
def test_the_longest_batch_does_not_fit_though_the_first_does(tmp_path):
    options = ("--device", "rtx-3060", "--scan", "200")

    shown, _ = dry_run("examples/dryrun/long_documents.py", *options, folder=tmp_path, expected=3)

    words = " ".join(shown.split())
    found = re.search(r"fits at step 1; the longest batch, ([\d,]+) tokens at index ([\d,]+), does not", words)
    tokens, index = (int(group.replace(",", "")) for group in found.groups())
    first = int(re.search(r"step 0: loss .*, (\d+) tokens", shown)[1])
    assert tokens > 2 * first
    assert 3 <= index < 200, "a run of three steps would have met it"


def test_one_rank_of_four_fits(tmp_path):
    script = "examples/dryrun/sharded.py"

    shown, _ = dry_run(script, "--device", "rtx-3090", "--count", "4", "--steps", "2", folder=tmp_path)

    assert "4 x NVIDIA GeForce RTX 3090: ran 2 steps" in " ".join(shown.split())
    assert "all figures are those of one device" in shown
    # A quarter of the parameters and of two states, 3.7 GiB, beside the activations; no whole parameters in the update.
    assert 8 < peak_gib(shown) < 14


@pytest.mark.slow
def test_one_device_is_too_small_for_all_shards(tmp_path):
    script = "examples/dryrun/sharded.py"

    shown, _ = dry_run(script, "--device", "rtx-3090", "--steps", "1", folder=tmp_path, expected=3)

    assert "would run out of memory on NVIDIA GeForce RTX 3090" in shown
    # Parameters, gradients, two states and the update's temporaries: five times 5.0 GiB.
    assert 25 < peak_gib(shown) < 32


@pytest.mark.slow
def test_a_script_is_planned_as_it_is(tmp_path):
    script = str(ROOT / "examples/dryrun/train.py")
    done = start("-m", "memfit", "plan", "--device", "rtx-3060", "--script", script, folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
    shown = " ".join(done.stdout.split())
    before, after = map(float, re.search(r": ([\d.]+) GiB -> ([\d.]+) GiB \(simulated\), budget 11.8", shown).groups())
    assert after < 11.8 < before
    assert "proven: the script was run with all of these moves in force" in shown


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


def guard_under_a_limit(limit_mib: int, expected: int) -> tuple[str, str, str]:
    """What examples/guard shows of the plain loop under a limit, of the guarded one, and of the one without a limit."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the limit is Linux's")
    shown = run("examples/guard/train.py", str(limit_mib), expected=expected)
    if limit_mib == 120:
        assert_fresh(README, "python examples/guard/train.py", shown)
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
    _, guarded, free = guard_under_a_limit(8, expected=3)

    assert "memory ran out on the host" in guarded
    assert re.search(r"nothing is left to try after micro-batches of 1 with \d modules recomputed", guarded)
    assert re.search(r"limit of this process +[\d.]+ MiB", guarded)
    assert not free


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of data are Linux's")
def test_a_stream_trains_where_loading_fails_and_goes_on_with_other_workers():
    shown = run("examples/stream/train.py")
    assert_fresh(README, "python examples/stream/train.py", shown)

    assert "MemoryError: Unable to allocate 256. MiB" in shown
    first, _, rest = shown.partition("the same again, now with 2 workers:")
    assert "killed after step 220" in first
    # Checkpoints are written in the background, so that the last one may not have been whole.
    assert re.match(r"\n  resumes after step (64|128|192)\n", rest)
    assert rest.endswith("the same losses: True\n")
    losses = [float(value) for value in re.findall(r": loss ([\d.]+)$", rest, re.MULTILINE)][-8:]
    assert losses[-1] < losses[0] - 0.5, "nothing is learned"


def test_a_keras_model_is_estimated_and_planned(monkeypatch):
    needs("keras")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    shown = run("examples/keras/plan.py")

    assert "small_cnn: training, batch size 64" in shown
    assert int(re.search(r"Keras on torch: the largest batch that fits is (\d+)", shown)[1]) > 64
    assert shown.rstrip().endswith("fit finished: True")


@pytest.mark.slow
def test_a_keras_fit_resumes_where_it_was_killed(monkeypatch, tmp_path):
    needs("keras")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    assert run("examples/keras/resume.py", str(tmp_path / "killed"), "33", expected=9) == "killed in mid-epoch\n"
    resumed = run("examples/keras/resume.py", str(tmp_path / "killed"))
    whole = run("examples/keras/resume.py", str(tmp_path / "whole"))

    losses = [float(text) for text in re.findall(r"^epoch \d: loss ([\d.]+)$", whole, re.MULTILINE)]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    assert resumed == whole


def test_what_a_keras_script_needs_is_told_without_training(monkeypatch):
    needs("keras", "jax")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    shown = run("-m", "memfit", "dryrun", "examples/keras/train.py")

    assert float(re.search(r"peak ([\d.]+) GiB of", shown)[1]) > 1
    assert "conv7" in shown


def test_keras_learns_from_one_file_and_is_tested_on_another(monkeypatch):
    needs("keras", "h5py", "pyarrow")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    shown = run("examples/keras/files.py")

    assert "classes of the test file: ash, birch, cedar, dogwood" in shown
    assert float(re.search(r"accuracy on the test file: ([\d.]+)%", shown)[1]) > 90
    assert_fresh(EXAMPLES / "keras" / "README.md", "python examples/keras/files.py", shown)


def test_a_step_of_jax_is_estimated_and_planned():
    needs("jax", "optax")
    shown = run("examples/jax/train.py")

    assert float(re.search(r"the step needs ([\d.]+) MiB less", shown)[1]) > 1
    assert "micro-batches" in shown
    assert shown.rstrip().endswith("the loss falls: True")


def test_a_conversion_halves_the_file_and_says_what_it_did_to_the_numbers(tmp_path):
    shown = run("examples/stream/convert.py", str(tmp_path))

    assert re.search(r"float64 +float32 .* 5\.96e-08 ", shown)
    assert "50% saved" in shown
    assert re.search(r"of a plain read \(measured\)", shown)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.npy", "train.npy"]


def test_search_takes_no_more_memory_for_more_trials(tmp_path):
    first = run("examples/many_models/search.py", "3", str(tmp_path))
    shown = run("examples/many_models/search.py", "6", str(tmp_path))

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
    shown = run("examples/many_models/ensemble.py", "5", str(tmp_path))

    one, within, all_of_them = map(float, re.findall(r": +([\d.]+) MiB more than before", shown))
    assert max(one, within) < all_of_them
    assert [float(found) for found in re.findall(r"largest difference .*: (\S+)", shown)] == pytest.approx(
        [0, 0], abs=1e-6
    )


# Their libraries import a torchvision that can't be imported everywhere without these.
WITH_OPERATORS = (
    "-c",
    "import runpy, sys; "
    "from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators as define; "
    "define(); sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')",
)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_DATA")
@pytest.mark.parametrize(
    ("package", "script"),
    [("transformers", "examples/trainers/with_transformers.py"), ("lightning", "examples/trainers/with_lightning.py")],
)
def test_a_trainer_finishes_with_too_little_memory(package, script, tmp_path, monkeypatch):
    needs(package)
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    guarded = start(*WITH_OPERATORS, script)
    plain = start(*WITH_OPERATORS, script, "--plain")
    enough = start(*WITH_OPERATORS, script, "--plain", "--memory", "1024")

    assert guarded.returncode == 0, guarded.stderr
    assert "memory ran out; going on with" in guarded.stderr
    assert "can't allocate memory" in plain.stderr
    assert plain.returncode == 1
    assert guarded.stdout.splitlines()[-1] == enough.stdout.splitlines()[-1]

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


def run(*arguments: str, expected: int = 0) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == expected, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


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


def test_demo_shows_what_fits_and_what_does_not(tmp_path):
    shown = run("examples/demo/demo.py", str(tmp_path / "pages"))

    assert "│ yes " in shown
    assert "│ no " in shown
    for name in ("resnet50", "gpt2"):
        page = tmp_path / "pages" / f"{name}.html"
        assert str(page) in shown.replace("\n", "")
        assert page.read_text(encoding="utf-8").startswith("<!")


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

    found = {precision: int(size) for precision, size in re.findall(r"^(\S+): (\d+) images fit", shown, re.MULTILINE)}
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

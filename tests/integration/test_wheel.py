"""The wheel with no extras in an empty environment: every command works there, or names the extra that is missing."""

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Command -> the extra that it names. Scripts of PyTorch need torch, tables pyarrow.
MISSING = {
    "estimate timm:resnet18 -d t4": "timm",
    "estimate hf:GPT2LMHeadModel -d t4": "hf",
    "estimate keras:ResNet50 -d t4": "keras",
    "max-batch timm:resnet18 -d t4": "timm",
    "compare timm:resnet18 timm:resnet50 -d t4": "timm",
    "plan timm:resnet18 -d t4": "timm",
    "plan -d t4 --script train.py": "torch",
    "dryrun -d t4 train.py": "torch",
    "data inspect table.parquet": "data",
    "data convert table.parquet table.npy": "data",
    "data bench table.parquet": "data",
}
WORKING = ("devices --json", "run plain.py --json", "data inspect x.npy", "data convert x.npy y.npy --dtype float32")


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """An environment with the wheel and what it depends on, and a folder with something to work on."""
    folder = tmp_path_factory.mktemp("bare")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(folder / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    assert list((folder / "dist").glob("memfit-*.tar.gz"))
    (wheel,) = (folder / "dist").glob("memfit-*.whl")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel]
    subprocess.run(install, check=True, capture_output=True)
    work = folder / "work"
    work.mkdir()
    (work / "plain.py").write_text("print('ran')\n")
    (work / "train.py").write_text("import torch\ntorch.ones(3, device='cuda')\n")
    (work / "table.parquet").write_bytes(b"PAR1 is how such a file begins PAR1")
    make = "import numpy; numpy.save('x.npy', numpy.ones((100, 8)))"
    subprocess.run([python, "-c", make], cwd=work, check=True)
    return folder / "venv" / "bin", work


def memfit(bare, command):
    programs, work = bare
    return subprocess.run(
        [programs / "memfit", *command.split()], cwd=work, capture_output=True, text=True, timeout=120
    )


def test_no_framework_came_along(bare):
    programs, _ = bare
    listed = subprocess.run(
        [programs / "python", "-m", "pip", "list", "--format", "json"], capture_output=True, text=True
    )
    names = {package["name"].lower() for package in json.loads(listed.stdout)}
    assert "memfit" in names
    assert not names & {"torch", "keras", "tensorflow", "jax", "pyarrow", "h5py", "optuna", "safetensors"}


@pytest.mark.parametrize("command", WORKING)
def test_commands_that_need_no_extra_work(bare, command):
    done = memfit(bare, command)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("command", "extra"), MISSING.items())
def test_commands_name_the_extra_that_is_missing(bare, command, extra):
    done = memfit(bare, command)
    assert done.returncode == 2
    assert f"memfit's extra {extra!r}" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") <= 2


def test_help_and_completion(bare):
    assert "estimate" in memfit(bare, "--help").stdout
    assert "_memfit" in memfit(bare, "completion bash").stdout

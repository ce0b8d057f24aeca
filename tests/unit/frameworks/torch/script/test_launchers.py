import os
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from memfit.core.dryrun import Outcome
from memfit.frameworks.torch.script.launchers import LaunchedProgram, launched_environment, program_of
from tests.unit.frameworks.torch.children import Children
from tests.unit.frameworks.torch.sessions import codes, running

TRAIN = """
import argparse, os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--local-rank", type=int)
arguments = parser.parse_args()
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION")
told = [os.environ.get(name) for name in names]
print(__name__, arguments.lr, arguments.local_rank, *told, torch.cuda.device_count())
if "RANK" in os.environ:
    dist.init_process_group("nccl")
model = torch.nn.Linear(64, 64).cuda()
model = DistributedDataParallel(model) if "RANK" in os.environ else model
optimizer = torch.optim.SGD(model.parameters(), arguments.lr)
for _ in range(9):
    model(torch.randn(8, 64).cuda()).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Runs a launcher on the script above; `train.py` stands for its path."""
    made = Children(tmp_path_factory.mktemp("launched"))
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "train.py").write_text(TRAIN)

    def run(module, line, **options):
        words = [str(folder / word) if word.endswith(".py") else word for word in line.split()]
        return made.run(module, *words, module=True, folder=folder, **options)

    yield run
    made.close()


@pytest.mark.parametrize(
    ("module", "line", "printed", "num_devices"),
    [
        ("torch.distributed.run", "--nproc_per_node=2 train.py --lr 0.5", "0.5 None 0 0 2 2 None 2", 2),
        ("torch.distributed.run", "--standalone --nproc-per-node 1 train.py --lr 1", "1.0 None 0 0 1 1 None 1", 1),
        ("torch.distributed.run", "--nnodes 2 --nproc-per-node 4 -m train --lr 1", "1.0 None 0 0 8 4 None 4", 4),
        ("torch.distributed.launch", "--nproc_per_node 2 train.py --lr 1", "1.0 0 0 0 2 2 None 2", 2),
        ("accelerate.commands.launch",
         "--num_processes 2 --mixed_precision bf16 train.py --lr 1", "1.0 None 0 0 2 2 bf16 2", 2),
        ("accelerate.commands.launch",
         "--num_processes 1 --mixed_precision fp16 train.py --lr 1", "1.0 None None None None None fp16 1", 1),
    ],
    ids=["torchrun", "standalone", "nodes-and-module", "launch", "accelerate-two", "accelerate-one"],
)  # fmt: skip
def test_the_script_of_a_launcher_runs_in_place(launched, module, line, printed, num_devices):
    child = launched(module, line)

    assert child.stdout == f"__main__ {printed}\n", child.stderr
    assert (child.run.outcome, child.run.num_steps, child.run.num_devices) == (Outcome.COMPLETED, 3, num_devices)
    # The report is the script's.
    assert os.path.basename(child.run.script) in ("train.py", "train")
    assert child.run.arguments[-2] == "--lr"
    assert child.run.module == ("-m" in line.split())


def test_an_error_of_the_script_is_shown_without_the_launchers_frames(launched):
    child = launched("torch.distributed.run", "--nproc_per_node=2 train.py --lr -1")

    assert (child.run.outcome, child.run.error.split(":")[0]) == (Outcome.FAILED, "ValueError")
    assert "in <module>" in child.stderr
    assert "distributed/run.py" not in child.stderr.partition("Traceback")[2]


def test_what_is_no_script_of_pythons_is_refused(launched):
    child = launched("torch.distributed.run", "--no-python --nproc_per_node=2 true")

    assert child.run.outcome is Outcome.FAILED
    assert "would start 'true', which is not a Python script" in child.stderr


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ([sys.executable, "train.py", "-m", "x"], LaunchedProgram("train.py", False, ("-m", "x"))),
        (["python3", "-u", "-X", "dev", "-m", "a.b", "1"], LaunchedProgram("a.b", True, ("1",))),
    ],
)
def test_the_program_of_a_command(words, program):
    assert program_of(words) == program


def test_an_executable_script(tmp_path):
    (tmp_path / "train").write_text("#!/usr/bin/env python\nprint(1)\n")

    assert program_of([str(tmp_path / "train"), "1"]) == LaunchedProgram(str(tmp_path / "train"), False, ("1",))


@pytest.mark.parametrize("words", [["python", "-c", "pass"], ["python"], ["python", "-m"], ["/bin/sh", "train.sh"]])
def test_commands_without_a_script(words):
    with pytest.raises(SystemExit, match="launcher would start"):
        program_of(words)


def test_what_the_first_process_is_told():
    config = SimpleNamespace(
        nproc_per_node=4, max_nodes=2, rdzv_endpoint="host:1234", role="r", max_restarts=0, run_id="id"
    )
    told = launched_environment(config)

    assert (told["WORLD_SIZE"], told["LOCAL_WORLD_SIZE"], told["GROUP_WORLD_SIZE"]) == ("8", "4", "2")
    assert (told["MASTER_ADDR"], told["MASTER_PORT"], told["TORCHELASTIC_RUN_ID"]) == ("host", "1234", "id")


def test_a_launcher_that_is_called_by_the_program_runs_the_first_in_place():
    seen = []

    def work(word):
        seen.append((word, os.environ["WORLD_SIZE"], torch.cuda.device_count(), len(torch.cuda.default_generators)))
        # A process of its own would keep this for itself.
        os.environ["SET_BY_THE_LAUNCHED"] = "1"
        del os.environ["HF_HUB_OFFLINE"]
        return "done"

    before = dict(os.environ)
    with running(count=1) as session:
        config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="none")
        results = elastic_launch(config, work)("hello")
        with pytest.raises(RuntimeError, match="memfit dryrun"):
            elastic_launch(config, sys.executable)("train.py")

    assert (results, seen) == ({0: "done"}, [("hello", "2", 2, 2)])
    assert set(codes(session)) == {"processes-not-spawned"}
    assert dict(os.environ) == before

"""Whole scripts, unmodified, each in a process of its own."""

import builtins
import dataclasses
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.allocator import LiveAllocator
from memfit.catalogue import find_device
from memfit.core.dryrun import DryRun, Outcome, Request
from memfit.core.replay import AllocatorOptions
from memfit.core.settings import Settings
from memfit.core.timeline import Category, Phase
from memfit.core.units import GIB, MIB
from memfit.frameworks.torch.script.script import ScriptRun
from memfit.frameworks.torch.shapes.restoration import random_states_kept
from memfit.frameworks.torch.simulation import distributed
from tests.unit.frameworks.torch.children import Children

T4 = find_device("t4")

TRAIN = """
import sys
import torch
from torch import nn

rows = int(sys.argv[1]) if len(sys.argv) > 1 else 8
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 10
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(steps):
    data, target = torch.randn(rows, 64).to(device), torch.randint(0, 10, (rows,)).to(device)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()
    print(f"step {step + 1} loss {loss.item():.3f} on {loss.device}")
print("the end")
"""


def usable(size_bytes):
    """A T4 with less memory for the program."""
    return dataclasses.replace(T4, usable_bytes=size_bytes + T4.context_bytes)


@pytest.fixture(scope="module")
def children(tmp_path_factory):
    made = Children(tmp_path_factory.mktemp("children"))
    yield made
    made.close()


def test_a_script_is_ended_after_the_steps_wanted(children):
    child = children.run(TRAIN)

    assert (child.run.outcome, child.run.num_steps, child.run.steps_wanted) == (Outcome.COMPLETED, 3, 3)
    assert (child.run.exit_code, child.return_code, child.run.error, child.run.failures) == (None, 0, "", ())
    # The third step's own line comes after the step that ended it.
    assert child.stdout.splitlines() == [f"step {n} loss 1.000 on cuda:0" for n in (1, 2)]
    assert child.stderr == ""
    assert child.run.estimate.subject == "train.py"
    assert child.run.estimate.num_parameters == 64 * 256 + 256 + 256 * 10 + 10
    assert child.run.fits


def test_a_script_that_ends_by_itself(children):
    child = children.run(TRAIN, "8", "2", steps=5)

    assert (child.run.outcome, child.run.num_steps, child.run.exit_code) == (Outcome.ENDED, 2, 0)
    assert child.run.arguments == ("8", "2")
    assert child.stdout.endswith("step 2 loss 1.000 on cuda:0\nthe end\n")


def test_a_script_without_a_step(children):
    child = children.run(TRAIN, "8", "0")

    assert (child.run.outcome, child.run.num_steps, child.run.exit_code) == (Outcome.NO_STEP, 0, 0)
    assert child.run.estimate.replay.allocated_peak_bytes > 0
    assert child.run.fits is None


FAILS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, data):
        return self.layer(data).view(7)

model = Model().cuda()
try:
    model(torch.zeros(2, 4).cuda())
except RuntimeError as error:
    raise ValueError("a bad\\nview") from error
"""


def frames_of_memfit(text):
    """Lines of a traceback that are in memfit's own code; the clone's folder, or the script's, may be called memfit."""
    return [line for line in text.splitlines() if str(Path(memfit.__file__).parent) in line]


def test_a_script_that_fails(children):
    child = children.run(FAILS)

    assert (child.run.outcome, child.run.exit_code, child.return_code) == (Outcome.FAILED, 1, 1)
    assert child.run.error == "ValueError: a bad view at train.py:17 in <module>"
    # What Python would have printed: the user's frames and PyTorch's, none of memfit's.
    lines = child.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "shape '[7]' is invalid for input of size 8" in child.stderr
    assert "The above exception was the direct cause of the following exception:" in lines
    assert 'train.py", line 17, in <module>' in child.stderr
    assert 'train.py", line 11, in forward' in child.stderr
    assert lines[-2:] == ["ValueError: a bad", "view"]
    assert frames_of_memfit(child.stderr) == []
    assert "runpy" not in child.stderr


FAILS_ELSEWHERE = """
import logging
import multiprocessing
import subprocess
import sys
import torch

def work():
    torch.nn.Linear(4, 4).cuda()(torch.zeros(2, 5).cuda())

if sys.argv[1] == "work":
    work()
elif sys.argv[1] == "command":
    subprocess.run([sys.executable, __file__, "work"])
elif sys.argv[1] == "log":
    try:
        work()
    except RuntimeError:
        logging.exception("a step failed")
else:
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
"""


@pytest.mark.parametrize("way", ["fork", "command", "log"])
def test_a_traceback_that_others_write(children, way):
    child = children.run(FAILS_ELSEWHERE, way)

    assert child.stderr.count("Traceback (most recent call last):") == 1
    assert ", in work" in child.stderr
    assert "RuntimeError: a and b must have same reduction dim" in child.stderr
    assert frames_of_memfit(child.stderr) == []


def test_a_script_that_cannot_be_read_as_python(children):
    child = children.run("import torch\nif torch\n")

    assert (child.run.outcome, child.run.exit_code) == (Outcome.FAILED, 1)
    assert child.run.error.startswith("SyntaxError: ")
    assert "if torch" in child.stderr
    assert frames_of_memfit(child.stderr) == []


@pytest.mark.parametrize(
    ("code", "outcome", "exit_code"),
    [
        ("3", Outcome.FAILED, 3),
        ("0", Outcome.NO_STEP, 0),
        ("", Outcome.NO_STEP, 0),
        ("'bad arguments'", Outcome.FAILED, 1),
    ],
)
def test_a_script_that_exits(children, code, outcome, exit_code):
    child = children.run(f"import sys\nsys.exit({code})\n")

    assert (child.run.outcome, child.run.exit_code, child.return_code) == (outcome, exit_code, exit_code)
    # As Python does, a text is printed and nothing else is.
    assert child.stderr == ("bad arguments\n" if code.startswith("'") else "")


def test_a_script_that_exits_after_a_step(children):
    child = children.run(TRAIN.replace('print("the end")', "sys.exit(3)"), "8", "1")

    assert (child.run.outcome, child.run.num_steps, child.run.exit_code) == (Outcome.FAILED, 1, 3)
    assert child.run.error.startswith("SystemExit: 3 at train.py:")


def test_a_device_that_is_too_small(children):
    child = children.run(TRAIN, "100000", device=usable(200 * MIB))

    run = child.run
    assert (run.outcome, run.exit_code, run.exit_code_of_command, run.fits) == (Outcome.OUT_OF_MEMORY, 1, 3, False)
    (failure,) = run.failures
    assert run.fatal == failure
    assert (failure.source, failure.phase, failure.step, failure.handled) == ("train.py:14", Phase.FORWARD, 1, False)
    assert failure.code == "loss = nn.functional.cross_entropy(model(data), target)"
    assert failure.message.startswith("CUDA out of memory. Tried to allocate 98.00 MiB. GPU 0 has a total capacity of ")
    assert run.error.startswith("OutOfMemoryError: CUDA out of memory.")
    assert child.stderr.splitlines()[-1].startswith("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate")
    assert frames_of_memfit(child.stderr) == []


def test_it_stops_at_the_same_operation_every_time(children):
    found = {
        (failure.tick, failure.op, failure.source, failure.message)
        for _ in range(3)
        for failure in children.run(TRAIN, "100000", device=usable(200 * MIB)).run.failures
    }

    assert len(found) == 1


def test_without_a_limit_it_tells_what_it_needs(children):
    child = children.run(TRAIN, "100000", device=usable(200 * MIB), unlimited=True)

    assert child.run.outcome is Outcome.COMPLETED
    assert child.run.estimate.peak_bytes > 200 * MIB
    # The script still sees the device that was asked for.
    assert child.run.estimate.device.usable_bytes == 200 * MIB + T4.context_bytes


WRAPPED = TRAIN.replace(
    "    loss.backward()",
    """    try:
        loss.backward()
        torch.zeros(2**32, device="cuda")
    except torch.OutOfMemoryError as error:
        HANDLING""",
)


@pytest.mark.parametrize(
    ("handling", "exit_code", "error"),
    [
        ('raise RuntimeError("training failed") from error', 1, "RuntimeError: training failed at train.py:"),
        ('raise RuntimeError("training failed")', 1, "RuntimeError: training failed at train.py:"),
        ("sys.exit(7)", 7, "SystemExit: 7 at train.py:"),
    ],
    ids=["cause", "context", "exit"],
)
def test_an_error_that_the_script_wraps_in_its_own(children, handling, exit_code, error):
    child = children.run(WRAPPED.replace("HANDLING", handling))

    assert (child.run.outcome, child.run.exit_code) == (Outcome.OUT_OF_MEMORY, exit_code)
    assert child.run.error.startswith(error)
    assert child.run.fatal.requested_bytes == 2**34


def test_another_failure_after_one_that_was_handled(children):
    child = children.run(WRAPPED.replace("HANDLING", "pass").replace('print("the end")', "1 / 0"), "8", "1")

    assert child.run.outcome is Outcome.FAILED
    assert child.run.error.startswith("ZeroDivisionError: ")
    assert [failure.handled for failure in child.run.failures] == [True]


RETRIES = """
import torch
from torch import nn

model = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = 65536
step = 0
while step < 10:
    try:
        optimizer.zero_grad()
        model(torch.zeros(rows, 1024).cuda()).relu().sum().backward()
        optimizer.step()
    except torch.cuda.OutOfMemoryError as error:
        assert "out of memory" in str(error).lower()
        rows //= 2
        torch.cuda.empty_cache()
        print("retry with", rows)
        continue
    step += 1
"""


def test_a_script_that_retries_with_half_the_batch(children):
    child = children.run(RETRIES, device=usable(GIB // 2))

    assert (child.run.outcome, child.run.num_steps) == (Outcome.COMPLETED, 3)
    assert child.stdout.startswith("retry with 32768\n")
    assert len(child.run.failures) == len(child.stdout.splitlines())
    assert all(failure.handled for failure in child.run.failures)
    assert child.run.fatal is None
    assert child.run.fits


def test_a_script_that_catches_everything_still_ends(children):
    child = children.run(
        TRAIN.replace("    optimizer.step()", "    try:\n        optimizer.step()\n    except Exception:\n        pass")
    )

    assert (child.run.outcome, child.run.num_steps) == (Outcome.COMPLETED, 3)


STUBBORN = TRAIN.replace(
    "    optimizer.step()", "    try:\n        optimizer.step()\n    except BaseException:\n        pass"
)


def test_a_script_that_catches_its_own_end_too_is_ended(children):
    child = children.run(STUBBORN, "8", "1000000")

    # Its last line is that of the step at which it was to end.
    assert (child.run.outcome, child.run.num_steps, child.return_code) == (Outcome.COMPLETED, 4, 0)
    assert child.stdout.splitlines()[-1].startswith("step 3 ")
    assert child.run.estimate.replay.allocated_peak_bytes > 0


def test_what_has_been_seen_is_told_before_it_is_left(here):
    class Left(BaseException):
        pass

    told = []

    def leave(result):
        told.append(result)
        raise Left

    # GIVEN a script that goes on after its end, in a process that can be left
    result, _ = here(STUBBORN.replace("except BaseException", "except SystemExit"), leave=leave)

    assert [(run.outcome, run.num_steps) for run in told] == [(Outcome.COMPLETED, 4)]
    assert result.outcome is Outcome.FAILED


IN_A_THREAD = """
import threading

def train():
    exec(compile({text!r}, "train.py", "exec"), {{}})

thread = threading.Thread(target=train)
thread.start()
thread.join()
threading.Event().wait(60)
print("went on")
"""


def test_a_script_that_trains_in_a_thread_is_ended(children):
    child = children.run(IN_A_THREAD.format(text=TRAIN))

    assert (child.run.outcome, child.run.num_steps) == (Outcome.COMPLETED, 3)
    assert "went on" not in child.stdout
    # Its end is no interrupt of the user's.
    assert "KeyboardInterrupt" not in child.stderr


def test_a_script_that_catches_every_full_device_and_gets_nowhere_does_not_fit(children):
    hopeless = TRAIN.replace("    loss.backward()", "    raise SystemExit(0)").replace(
        "for step", "try:\n    torch.zeros(2**40, device=device)\nexcept torch.OutOfMemoryError:\n    pass\nfor step"
    )
    child = children.run(hopeless)

    assert (child.run.outcome, child.run.num_steps, child.run.exit_code) == (Outcome.OUT_OF_MEMORY, 0, 0)
    assert child.run.fits is False


READS = """
import torch
found = torch.randn(3, device="cuda").cumsum(0).sum().item()
{check}
"""


@pytest.mark.parametrize(
    "check",
    ["assert found > 2", "if found != 3:\n    raise ValueError('a wrong number')", "1 / (found - 1)"],
    ids=["AssertionError", "ValueError", "ZeroDivisionError"],
)
def test_a_check_that_fails_after_values_were_read_says_what_may_be_the_reason(here, check):
    result, _ = here(READS.format(check=check))

    assert result.outcome is Outcome.FAILED
    assert result.suspicion.endswith("stand in for the device's (train.py:3)")


@pytest.mark.parametrize(
    "script",
    [
        READS.format(check="raise RuntimeError('mine')"),
        READS.format(check="print(found)\nprint({}['missing'])"),
        "raise ValueError('mine')\n",
    ],
    ids=["an error of another kind", "an error elsewhere", "nothing was read"],
)
def test_other_failures_say_nothing_of_values(here, script):
    result, _ = here(script)

    assert result.outcome is Outcome.FAILED
    assert result.suspicion == ""


def test_a_long_message_is_shortened(here):
    result, _ = here("raise RuntimeError('many words ' * 1000)\n")

    assert result.error.startswith("RuntimeError: many words many words")
    assert result.error.endswith(" ... at train.py:1 in <module>")
    assert len(result.error) < 400


def test_what_a_script_does_at_its_end_is_done(children):
    # GIVEN a script that puts its things in order however its training ends
    orderly = TRAIN.replace("\n    ", "\n        ").replace("for step in", "try:\n    for step in")
    child = children.run(orderly.replace('print("the end")', 'finally:\n    print("in order")'))

    assert child.run.outcome is Outcome.COMPLETED
    assert child.stdout.splitlines()[-1] == "in order"


ENVIRONMENT = """
import os, sys
import beside
print(__name__, __file__ == sys.argv[0], sys.argv[1:], sys.path[0] == os.path.dirname(os.path.abspath(__file__)))
print(beside.NAME, sys.modules["__main__"].__dict__ is globals())
"""


def test_a_script_finds_itself_where_python_would_put_it(children, tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'a module beside it'\n")
    (tmp_path / "train.py").write_text(ENVIRONMENT)
    child = children.run(tmp_path / "train.py", "--epochs", "3")

    assert child.stdout == "__main__ True ['--epochs', '3'] True\na module beside it True\n"


@pytest.fixture
def package(tmp_path):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").write_text("")
    (tmp_path / "trainer" / "run.py").write_text(f"from trainer.parts import WORD\nprint(__name__, WORD)\n{TRAIN}")
    (tmp_path / "trainer" / "parts.py").write_text("WORD = 'hello'\n")
    return tmp_path


def test_a_module(children, package):
    child = children.run("trainer.run", "16", module=True, folder=package)

    assert (child.run.outcome, child.run.script, child.run.arguments) == (Outcome.COMPLETED, "trainer.run", ("16",))
    assert child.stdout.startswith("__main__ hello\n")


def test_a_module_that_is_not_there(children, package):
    child = children.run("trainer.missing", module=True, folder=package)

    assert child.run.outcome is Outcome.FAILED
    assert "No module named trainer.missing" in child.run.error


def test_the_result_is_a_dry_run(children):
    child = children.run(TRAIN)

    assert DryRun.from_json(child.run.to_json()) == child.run
    assert child.data["loader_ordinal"] is None
    assert child.run.scan is None


SENTENCES = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

LENGTHS = [8, 16, 8, 400, 8, 16, 8, 8]

class Sentences(Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return {"input_ids": torch.zeros(LENGTHS[index], dtype=torch.int64)}

model = nn.Sequential(nn.Embedding(1000, 512), nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 1000)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for batch in DataLoader(Sentences()):
    pass
for epoch in range(5):
    for batch in DataLoader(Sentences()):
        ids = batch["input_ids"].cuda()
        print(ids.shape[1])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
"""


def test_the_loader_that_feeds_the_steps_is_told(children):
    child = children.run(SENTENCES)

    assert child.data["loader_ordinal"] == 1
    assert child.run.scan is None
    assert child.stdout == "8\n16\n8\n"


def test_a_scan_begins_with_the_largest_batch(children):
    child = children.run(SENTENCES, scan=6, largest_first=True, loader_ordinal=1, steps=2)

    scan = child.run.scan
    assert child.stdout.startswith("400\n")
    assert (scan.num_batches, scan.total, scan.largest_index, scan.largest_tokens) == (6, 8, 3, 400)
    assert [(leaf.name, leaf.smallest_shape, leaf.largest_shape) for leaf in scan.leaves] == [
        ("input_ids", (1, 8), (1, 400))
    ]


def test_a_scan_shows_the_peak_of_the_largest_batch_in_a_later_step(children):
    # GIVEN what training on nothing but the largest batch takes, with the optimizer's state there from step 2 on
    longest = children.run(SENTENCES.replace("[8, 16, 8, 400, 8, 16, 8, 8]", "[400] * 8"), steps=3)

    # WHEN a scan sees all batches of the loader
    child = children.run(SENTENCES, scan=8, largest_first=True, loader_ordinal=1, steps=2)

    # THEN it has the same peak: that batch may come at any step
    expected = longest.run.estimate.replay.allocated_peak_bytes
    assert child.run.estimate.replay.allocated_peak_bytes == pytest.approx(expected, rel=0.01)


def test_a_scan_of_a_script_without_a_loader_has_a_problem(children):
    child = children.run(TRAIN, scan=6, largest_first=True, loader_ordinal=None)

    assert "DataLoader" in child.run.scan.problem


def test_several_devices_are_seen_as_a_launcher_would_show_them(children):
    child = children.run(
        """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
print(dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"], torch.cuda.device_count())
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = DistributedDataParallel(nn.Linear(8, 8).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.zeros(2, 8).cuda()).sum().backward()
    optimizer.step()
""",
        count=2,
    )

    assert child.run.outcome is Outcome.COMPLETED, child.stderr
    assert (child.stdout, child.run.num_devices) == ("0 2 0 2\n", 2)


def test_the_same_script_draws_the_same_numbers_every_time(children):
    script = "import random, numpy, torch\nprint(random.random(), numpy.random.rand(), torch.rand(1).item())\n"
    first, second = children.run(script), children.run(script)

    assert first.stdout == second.stdout != ""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Runs a script in this process, whose arguments, paths and environment are put back afterwards."""

    def run(text, *arguments, capacity_bytes=None, leave=None, **options):
        monkeypatch.setattr(sys, "argv", [])
        monkeypatch.setattr(sys, "path", list(sys.path))
        path = tmp_path / "train.py"
        path.write_text(text, encoding="utf-8")
        request = Request(**{"script": str(path), "module": False, "arguments": arguments, "device": T4, **options})
        configured = []
        made = ScriptRun(
            request, LiveAllocator(AllocatorOptions(), capacity_bytes), lambda report: configured.append(1)
        )
        if leave is not None:
            made.leave_with(leave)
        with random_states_kept():
            result = made.run()
        return result, configured

    return run


def test_in_this_process_a_run_leaves_no_trace(here, tmp_path):
    stacks = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
    plain = builtins.open, sys.modules["__main__"]
    result, configured = here(TRAIN)

    assert (result.outcome, result.num_steps) == (Outcome.COMPLETED, 3)
    # Before the first allocation, when the script has had its chance to set the allocator.
    assert configured == [1]
    assert [stack() for stack in stacks] == [0, 0]
    assert (builtins.open, sys.modules["__main__"]) == plain
    assert not torch.cuda.is_available()


def test_in_this_process_a_traceback_is_the_scripts(here, capsys):
    result, _ = here(FAILS)

    assert (result.outcome, result.exit_code) == (Outcome.FAILED, 1)
    printed = capsys.readouterr().err
    assert printed.endswith("ValueError: a bad\nview\n")
    assert "script.py" not in printed


def test_the_text_of_an_exception_cannot_steer_the_terminal(here, capsys):
    here("raise ValueError('a' + chr(27) + '[31m' + chr(0x202e))")

    assert capsys.readouterr().err.splitlines()[-1] == r"ValueError: a\x1b[31m\u202e"


def test_in_this_process_a_full_device(here):
    result, _ = here(TRAIN, "100000", capacity_bytes=200 * MIB)

    assert (result.outcome, result.error.split(":")[0]) == (Outcome.OUT_OF_MEMORY, "OutOfMemoryError")
    assert result.fatal.source.endswith("train.py:14")


def test_in_this_process_a_module(here, package, monkeypatch):
    monkeypatch.chdir(package)
    result, _ = here("", "16", script="trainer.run", module=True)
    for name in ("trainer", "trainer.parts"):
        sys.modules.pop(name, None)

    assert (result.outcome, result.script) == (Outcome.COMPLETED, "trainer.run")


def test_in_this_process_several_devices_and_a_scan(here, monkeypatch):
    for name in distributed.environment(2):
        monkeypatch.setenv(name, "set by the test, to be removed after it")
        monkeypatch.delenv(name)
    result, _ = here(SENTENCES, count=2, scan=4, largest_first=True, loader_ordinal=1)

    assert (result.num_devices, result.scan.num_batches, result.scan.largest_index) == (2, 4, 3)
    without, _ = here(TRAIN, scan=4, largest_first=True)
    assert "DataLoader" in without.scan.problem


def test_batches_of_a_loop_without_a_loader_are_split_where_they_are_copied(here):
    # GIVEN what a first run has seen
    whole, _ = here(TRAIN, "4096", watch=True)
    assert (whole.seen.batch_size, whole.seen.autocast) == (4096, False)
    assert [line.partition(":")[0] for line in whole.seen.batch_lines] == ["train.py"]

    # WHEN the script runs with four micro-batches
    given = {"batch_lines": whole.seen.batch_lines, "batch_size": 4096, "steps": 2, "unlimited": True}
    quarter, _ = here(TRAIN, "4096", settings=Settings(set_to_none=False, micro_batches=4), **given)

    # THEN it needs what it needs when it is given a quarter of the samples, with gradients accumulated
    alone, _ = here(TRAIN, "1024", steps=2)
    gradients = sum(b.size_bytes for b in alone.estimate.timeline.blocks if b.category is Category.GRADIENT) // 2
    assert quarter.num_steps == 2
    most, peak = (run.estimate.timeline.peak()[1] for run in (quarter, alone))
    assert peak <= most <= peak + gradients
    assert [str(mark.phase) for mark in quarter.estimate.timeline.marks].count("backward") == 8

    # AND with an update for each quarter, exactly what the script needs that is given a quarter
    settings = Settings(set_to_none=False, micro_batches=4)
    each, _ = here(TRAIN, "4096", settings=settings, accumulates=False, **given)
    assert (each.num_steps, each.estimate.peak_bytes) == (2, alone.estimate.peak_bytes)


AUTOCAST = TRAIN.replace("loss = nn", 'with torch.autocast("cuda"):\n        loss = nn')


def test_autocast_of_the_script_is_seen(here):
    result, _ = here(AUTOCAST, watch=True)

    assert result.seen.autocast


PROCESSES = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "print('trains')"], check=True)
"""


def test_a_script_that_lets_others_do_the_work_says_so(here):
    result, _ = here(PROCESSES)

    assert result.outcome is Outcome.NO_STEP
    assert "it started other processes" in result.error


def test_the_peak_is_that_of_the_estimate(children):
    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    batch = torch.zeros(4096, 64), torch.zeros(4096, dtype=torch.int64)
    estimate = memfit.estimate(model, loss, batch, optimizer=torch.optim.AdamW, device="t4")
    child = children.run(TRAIN, "4096")

    expected = estimate.replay.allocated_peak_bytes
    assert child.run.estimate.replay.allocated_peak_bytes == pytest.approx(expected, rel=0.01)


COMPILED = """
import torch

@torch.compile
def loss(x):
    return torch.sin(x).sum()

loss(torch.randn(64, device="cuda", requires_grad=True)).backward()
{then}
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("then", "expected"),
    [
        ("raise ValueError('my own mistake')", False),
        ("torch.compile(lambda: {}['missing'])()", False),
        ("raise torch._dynamo.exc.Unsupported('x')", True),
    ],
)
def test_a_failure_of_the_compiler_is_told_from_the_scripts_own(here, then, expected):
    result, _ = here(COMPILED.format(then=then))

    assert result.outcome is Outcome.FAILED
    assert result.compiler_failed is expected

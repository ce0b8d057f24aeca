from dataclasses import replace

import pytest

import memfit
from memfit.core.dryrun import Outcome
from memfit.core.errors import BadFile, BadInput, StepFailed
from memfit.core.timeline import Phase
from tests import jobs
from tests.snapshot_files import written

torch = pytest.importorskip("torch")

SCRIPT = """
import torch

torch.cuda.memory._record_memory_history(max_entries=100_000)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.zeros(32, 64, device="cuda")).sum().backward()
    optimizer.step()
torch.cuda.memory._dump_snapshot("snapshot.pickle")
"""


def test_a_job_against_its_own_history(tmp_path):
    job = jobs.conv_job()
    timeline = memfit.estimate(job, device="rtx-3090").timeline
    snapshot = written(timeline, tmp_path / "snapshot.pickle", keeps=lambda block: block.op != "aten.convolution")

    result = memfit.diff(snapshot, job, device="rtx-3090")

    assert result.is_whole
    assert result.num_missing == 0
    assert {group.op for group in result.groups} == {"aten.convolution"}
    assert result.versions["stack"].startswith("torch")
    assert "allocations" in repr(result)


def test_a_script_runs_as_in_a_dry_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    run = memfit.dryrun("train.py", device="rtx-3090")
    late = next(mark.tick for mark in run.estimate.timeline.marks if mark.step == 3 and mark.phase is Phase.FORWARD)
    snapshot = written(run.estimate.timeline, tmp_path / "snapshot.pickle", first_tick=late)

    result = memfit.diff(snapshot, "train.py", device="rtx-3090")

    # THEN the last of its steps is found
    assert not result.is_whole
    assert result.is_same
    assert result.first_step == 3
    # AND what has been run already need not be run again
    assert memfit.diff(snapshot, run) == result

    # AND where it fails there is nothing to compare
    failed = replace(run, outcome=Outcome.FAILED, error="ValueError: no data")
    with pytest.raises(StepFailed, match=r"train\.py: failed in the simulation: .*no data.*memfit dryrun"):
        memfit.diff(snapshot, failed)


def test_a_device_that_is_too_small_is_refused(tmp_path):
    timeline = memfit.estimate(jobs.conv_job(), device="t4").timeline
    snapshot = written(timeline, tmp_path / "snapshot.pickle")

    with pytest.raises(BadInput, match=r"runs out of memory on the simulated device.*Name the GPU"):
        memfit.diff(snapshot, jobs.conv_job(), device="20MiB")


def test_a_program_that_does_nothing_is_refused(tmp_path):
    snapshot = written(memfit.estimate(jobs.conv_job(), device="t4").timeline, tmp_path / "snapshot.pickle")
    with memfit.simulate("t4") as device:
        pass

    with pytest.raises(BadInput, match="put nothing on the device"):
        memfit.diff(snapshot, device.estimate())


def test_the_snapshot_is_refused_before_the_program_runs(tmp_path):
    # GIVEN a path of a script that isn't there
    with pytest.raises(BadFile, match=r"missing\.pickle"):
        memfit.diff(tmp_path / "missing.pickle", "missing.py", device="t4")


def test_a_snapshot_of_a_gpu_is_not_compared_with_the_host(tmp_path):
    snapshot = written(memfit.estimate(jobs.conv_job(), device="t4").timeline, tmp_path / "snapshot.pickle")

    with pytest.raises(BadInput, match="a snapshot is of a GPU, but cpu was simulated"):
        memfit.diff(snapshot, jobs.conv_job(), device="cpu")

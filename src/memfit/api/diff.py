"""`memfit.diff`: a real device's memory snapshot against the simulation of the program that made it."""

import os
from collections.abc import Iterable

from memfit.api.devices import resolve
from memfit.api.dryrun import dryrun
from memfit.api.estimate import estimate
from memfit.api.result_reports import late
from memfit.core.device import Device, Kind
from memfit.core.dryrun import DryRun, DryRunOptions, Outcome
from memfit.core.errors import BadInput, StepFailed
from memfit.core.estimate import Estimate
from memfit.core.job import Job
from memfit.core.progress import doing
from memfit.core.units import format_size
from memfit.frameworks.torch.stack import stack_of
from memfit.reports.diff import figures
from memfit.snapshots.difference import Simulated, SnapshotDifference, compare_with
from memfit.snapshots.reader import read_snapshot

STEPS = 10
"""Optimizer steps of a script that are simulated, where nobody says how many."""

_RAN = (Outcome.COMPLETED, Outcome.ENDED, Outcome.NO_STEP)

# Not with the other results, since every program would load how snapshots are read.
SnapshotDifference.reporters.use(figures.report, late("memfit.reports.page", "write_page"))


def diff(
    snapshot: str | os.PathLike[str],
    subject: str | os.PathLike[str] | Job | Estimate | DryRun,
    arguments: Iterable[str] = (),
    *,
    device: str | Device | None = None,
    module: bool = False,
    steps: int = STEPS,
    history: int | None = None,
) -> SnapshotDifference:
    """What a real GPU was asked for against what the simulation of the same program is asked for.

    Args:
        snapshot: a file of `torch.cuda.memory._dump_snapshot`, compressed or not.
        subject: the program: the path of a script, a `Job`, or what has been simulated already, such as
            `memfit.simulate(...)`'s `estimate()`.
        arguments: of the script.
        device: to simulate, as for `estimate`: the GPU that made the snapshot.
        module: whether `subject` is the name of a module, as for `python -m`.
        steps: optimizer steps after which the script is ended: at least as many as the snapshot shows.
        history: number of the device in the snapshot; None: the only one that has a history.

    Returns:
        What is missing, invented, in another order, or freed at another time, and what that does to the peak.
    """
    read = read_snapshot(os.fspath(snapshot))
    # Refused before any time is spent on the program.
    read.history(history)
    if isinstance(subject, Estimate | DryRun):
        result: Estimate | DryRun = subject
    elif isinstance(subject, Job):
        result = estimate(subject, device=resolve(device))
    else:
        result = dryrun(
            subject, arguments, device=device, module=module, steps=steps, options=DryRunOptions(quiet_output=True)
        )
    simulated = _estimate_of(result)
    with doing("aligning"):
        timeline, replay = simulated.timeline, simulated.replay
        side = Simulated(simulated.subject, simulated.device.title, timeline, replay)
        return compare_with(read, side, history, {"stack": stack_of(simulated.device).text})


def _estimate_of(result: Estimate | DryRun) -> Estimate:
    """What was simulated, where it is whole."""
    if isinstance(result, DryRun):
        simulated, is_full = result.estimate, result.outcome is Outcome.OUT_OF_MEMORY
        if result.outcome not in _RAN and not is_full:
            raise StepFailed(
                f"{result.script}: {result.outcome} in the simulation{': ' + result.error if result.error else ''}. "
                "There is nothing to compare until it runs: `memfit dryrun` says more."
            )
    else:
        simulated, is_full = result, False
    if simulated is not None and simulated.device.kind is not Kind.CUDA:
        raise BadInput(
            f"a snapshot is of a GPU, but {simulated.device.name} was simulated. Name the GPU that made it "
            "(device=..., --device)."
        )
    if simulated is None or not simulated.timeline.blocks:
        raise BadInput("the simulation put nothing on the device: name the program that made the snapshot.")
    if is_full or simulated.replay.out_of_memory is not None:
        usable = format_size(simulated.capacity_bytes)
        raise BadInput(
            f"{simulated.subject} runs out of memory on the simulated device ({usable} usable), and on the real one it "
            "didn't. Name the GPU that made the snapshot; where you have, name a size such as 200GiB to see what "
            "differs."
        )
    return simulated

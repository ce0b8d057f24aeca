"""Dry runs made by hand for tests: no framework and no process."""

import dataclasses

from memfit.core.device import Device, Origin
from memfit.core.dryrun import Advice, DryRun, Failure, Outcome, Scan, ScannedLeaf
from memfit.core.estimate import Estimate, HostMemory, Note
from memfit.core.replay import OutOfMemory
from memfit.core.timeline import Phase
from memfit.core.units import GIB, KIB, MIB
from tests.unit.reports.builders import RTX_3090, make_estimate

SMALL = dataclasses.replace(RTX_3090, usable_bytes=900 * MIB)
NOTES = (
    Note("data-dependent-shape", "nonzero: its size depends on data; upper bound used", "train.py:88"),
    Note("stand-in-value", "a value was read from the device: 1.0 stands in for it", "train.py:91"),
    Note("stand-in-value", "values were copied from the device to the host: zeros stand in for them", "train.py:97"),
)
ADVICE = (
    Advice("checkpoint activations of 12 blocks", 400 * MIB, 700 * MIB, "exact", "checkpoint(block)", Origin.ASSUMED),
    Advice("let the allocator grow", 100 * MIB, 1000 * MIB, "rounding", "expandable_segments:True", Origin.SIMULATED),
    Advice("keep the state in 8 bits", 90 * MIB, 1010 * MIB, "changes training", "AdamW8bit", Origin.ASSUMED),
)


def make_run_estimate(device: Device = RTX_3090, **changes: object) -> Estimate:
    """What the child estimates for a script."""
    usual = {"subject": "train.py", "mode": "dry run", "precision": "as given", "batch_size": None}
    return make_estimate(device=device, **{**usual, "host": HostMemory({}), "notes": NOTES, **changes})


def make_run(**changes: object) -> DryRun:
    """A script that ran its three steps; `changes` replace fields of the run."""
    run = DryRun(
        script="train.py",
        arguments=("--batch-size", "64"),
        estimate=make_run_estimate(),
        outcome=Outcome.COMPLETED,
        num_steps=3,
        steps_wanted=3,
        seconds=8.2,
    )
    return dataclasses.replace(run, **changes)  # type: ignore[arg-type]


def make_failure(**changes: object) -> Failure:
    """An allocation that a device of 900 MiB refused."""
    failure = Failure(
        message="CUDA out of memory. Tried to allocate 64.00 MiB.",
        tick=200,
        requested_bytes=64 * MIB,
        allocated_bytes=540 * MIB,
        reserved_bytes=560 * MIB,
        source="train.py:88",
        code="    logits = model(tokens)",
        module="layer2.3.conv",
        op="aten.convolution",
        phase=Phase.FORWARD,
        step=1,
        by_category={"activation": 470 * MIB, "parameter": 62 * MIB, "input batch": 6 * MIB},
    )
    return dataclasses.replace(failure, **changes)  # type: ignore[arg-type]


def make_dead_run(**changes: object) -> DryRun:
    """A script that died of a device of 900 MiB; its estimate is that of an unlimited one."""
    estimate = make_run_estimate(SMALL)
    lost = OutOfMemory(200, 64 * MIB, 540 * MIB, 560 * MIB)
    usual = {
        "estimate": dataclasses.replace(estimate, replay=dataclasses.replace(estimate.replay, out_of_memory=lost)),
        "outcome": Outcome.OUT_OF_MEMORY,
        "num_steps": 0,
        "failures": (make_failure(),),
        "error": "OutOfMemoryError: CUDA out of memory. (train.py:88)",
        "exit_code": 1,
        "advice": ADVICE,
    }
    return make_run(**{**usual, **changes})


def make_scan(**changes: object) -> Scan:
    """Batches of which the longest does not fit."""
    scan = Scan(
        num_batches=500,
        total=1204,
        leaves=(ScannedLeaf("input_ids", "int64", (8, 112), (8, 4812)), ScannedLeaf("labels", "int64", (8,), (8,))),
        smallest_bytes=7 * KIB,
        median_bytes=44 * KIB,
        largest_bytes=301 * KIB,
        largest_index=311,
        largest_tokens=4812,
        fits=False,
        peak_bytes=26 * GIB,
        failure=make_failure(step=2),
    )
    return dataclasses.replace(scan, **changes)  # type: ignore[arg-type]

"""Plans made by hand for tests: no framework and no search."""

import dataclasses

from memfit.core.device import Origin
from memfit.core.estimate import Note
from memfit.core.plan import Footprint, Plan, PlannedMove, Point, Refusal, Seconds
from memfit.core.settings import Keeps, OptimizerKernels, Settings
from memfit.core.units import MIB
from tests.unit.reports.builders import RTX_3090, make_estimate, make_timeline

SETTINGS = Settings(
    micro_batches=4, checkpoint=("layer1.0", "layer1.1", "layer2.0"), kernels=OptimizerKernels.FUSED, channels_last=True
)
MOVES = (
    PlannedMove(
        "micro-batches",
        "4 micro-batches of 8 samples, gradients accumulated",
        Keeps.ROUNDING,
        310 * MIB,
        Origin.SIMULATED,
        0.021,
        Origin.ASSUMED,
        "dropout draws other numbers than one pass over the whole batch would",
    ),
    PlannedMove(
        "checkpoint", "recompute 3 of 16 blocks", Keeps.EXACT, 120 * MIB, Origin.SIMULATED, 0.0123, Origin.ASSUMED
    ),
    PlannedMove(
        "fused-optimizer", "fused optimizer", Keeps.ROUNDING, -2 * MIB, Origin.ASSUMED, -0.0015, Origin.ASSUMED
    ),
    PlannedMove("channels-last", "channels last", Keeps.EXACT, 0, Origin.ASSUMED, None, Origin.ASSUMED),
)


def make_front() -> tuple[Point, ...]:
    """Ten plans; that of `SETTINGS` is the fifth."""
    found = []
    for index in range(10):
        settings = SETTINGS if index == 4 else Settings(micro_batches=index + 1)
        label = f"{settings.micro_batches} micro-batches" + (", recompute 3 blocks, fused" if index == 4 else "")
        peak, seconds = (1160 - 65 * index) * MIB, 0.171 + 0.00795 * index
        found.append(Point(peak, seconds, "as it is" if index == 0 else label, settings, verified=index in (0, 4)))
    return tuple(found)


def make_plan(**changes: object) -> Plan:
    """A plan for a residual network that should take 900 MiB of an RTX 3090; `changes` replace fields."""
    before, after = make_estimate(), make_estimate(make_timeline(scale=int(0.7 * MIB)), notes=())
    plan = Plan(
        subject="ResNet",
        device=RTX_3090,
        budget_bytes=900 * MIB,
        batch_size=32,
        settings=SETTINGS,
        moves=MOVES,
        before=Footprint.of(before),
        after=Footprint.of(after),
        seconds_before=Seconds(0.171, Origin.ASSUMED),
        seconds_after=Seconds(0.2028, Origin.ASSUMED),
        front=make_front(),
        refused=(
            Refusal("cross-entropy", "no cross entropy over a large vocabulary comes straight from a linear layer"),
            Refusal("8-bit-optimizer", "it changes training; allow it with allow=(..., '8-bit-optimizer')"),
        ),
        notes=(Note("time-model", "times are computed from peak rates of the device; 45% of them assumed reachable"),),
        planned_in_seconds=3.21,
        estimate_before=before,
        estimate_after=after,
    )
    return dataclasses.replace(plan, **changes)  # type: ignore[arg-type]


def make_easy_plan() -> Plan:
    """A step that fits as it is."""
    whole = make_plan()
    return dataclasses.replace(
        whole,
        budget_bytes=RTX_3090.usable_bytes or 0,
        settings=Settings(),
        moves=(),
        after=whole.before,
        seconds_after=whole.seconds_before,
        front=whole.front[:1],
        refused=(),
        notes=(),
        estimate_after=whole.estimate_before,
    )


def make_small_plan() -> Plan:
    """The smallest plan where nothing fits, on a device of unknown speed, after a round trip through JSON."""
    return make_plan(
        budget_bytes=512 * MIB,
        seconds_before=Seconds(None),
        seconds_after=Seconds(None),
        moves=tuple(dataclasses.replace(move, costs_seconds=None) for move in MOVES),
        front=tuple(dataclasses.replace(point, seconds=None) for point in make_front()[4:6]),
        estimate_before=None,
        estimate_after=None,
        after=dataclasses.replace(make_plan().after, host_bytes=96 * MIB),
    )

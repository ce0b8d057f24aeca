"""Dry runs of scripts, made from timelines by hand."""

from memfit.allocator import replay
from memfit.catalogue import find_device
from memfit.core.estimate import DRY_RUN, Estimate, HostMemory
from memfit.core.profile import Work
from memfit.core.replay import AllocatorOptions
from memfit.core.timeline import Phase, Timeline
from memfit.core.units import MIB
from memfit.planner.script_space import ScriptMemory
from memfit.planner.speed import ScriptSpeed
from memfit.timing import rates_of
from tests.unit.planner.builders import training

CONTEXT = 100 * MIB
WEIGHT, NUM_LAYERS = 8 * MIB, 8


def estimate_of(timeline: Timeline, **changes: object) -> Estimate:
    """What a dry run on an A100 without a limit says."""
    replayed = replay(timeline, AllocatorOptions())
    given = {
        "subject": "train.py",
        "device": find_device("a100-40gb"),
        "mode": DRY_RUN,
        "precision": "as given",
        "batch_size": None,
        "timeline": timeline,
        "replay": replayed,
        "context_bytes": CONTEXT,
        "certain_bytes": replayed.allocated_peak_bytes + CONTEXT,
        "tight_bytes": replayed.allocated_peak_bytes + CONTEXT,
        "host": HostMemory({}),
        "num_parameters": NUM_LAYERS * WEIGHT // 4,
    }
    return Estimate(**{**given, **changes})


def stack(**options: object) -> Timeline:
    """Eight layers that keep 48 MiB each, trained for two steps."""
    return training(NUM_LAYERS, 2, **options)


def work(num_layers: int = NUM_LAYERS, flops: int = 10**12) -> tuple[Work, ...]:
    """A forward pass, a backward pass of twice the work, and an update by foreach kernels."""
    layers = [f"layers.{number}.up" for number in range(num_layers)]
    forward = [Work(name, Phase.FORWARD, "aten.mm", flops, 50 * MIB, "float32") for name in layers]
    backward = [Work(name, Phase.BACKWARD, "aten.mm", 2 * flops, 100 * MIB, "float32") for name in reversed(layers)]
    update = Work("", Phase.OPTIMIZER, "aten._foreach_add_", 0, 20 * num_layers * WEIGHT, "float32")
    return (*forward, *backward, update)


def memory_of(timeline: Timeline) -> ScriptMemory:
    """Memory of a script with this timeline."""
    return ScriptMemory(estimate_of(timeline), AllocatorOptions())


def speed_of(timeline: Timeline, operators: tuple[Work, ...] = work()) -> ScriptSpeed:
    """Speed of a script with this timeline on an A100."""
    device = find_device("a100-40gb")
    return ScriptSpeed(operators, timeline, rates_of(device))

"""The allocator of TensorFlow and JAX on GPUs: best fit with coalescing."""

from dataclasses import replace

from memfit.allocator.plain import replay_plain
from memfit.core.replay import Replay
from memfit.core.timeline import Timeline

_ROUND_BYTES = 256


def replay_best_fit(timeline: Timeline, capacity_bytes: int | None = None) -> Replay:
    """Memory over time as the allocator hands it out.

    Args:
        timeline: what the program asks for.
        capacity_bytes: what the device can give; None: no limit.
    """
    blocks = tuple(replace(b, size_bytes=-(-b.size_bytes // _ROUND_BYTES) * _ROUND_BYTES) for b in timeline.blocks)
    return replay_plain(Timeline(blocks, timeline.num_ticks, timeline.marks), capacity_bytes)

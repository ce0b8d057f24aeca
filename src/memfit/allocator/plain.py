"""Host memory: what is asked for is what is taken.

A host allocator rounds and keeps far less than the CUDA caching allocator, and differently on every system, so that
the plain sum of live bytes is the honest answer there.
"""

from memfit.allocator.ticks import signed_events
from memfit.core.replay import OutOfMemory, Replay
from memfit.core.timeline import Timeline


def replay_plain(timeline: Timeline, capacity_bytes: int | None = None) -> Replay:
    """Memory over time where nothing is rounded or cached: reserved equals allocated equals the live bytes.

    Args:
        timeline: what the program asks for.
        capacity_bytes: what the host can give; None: no limit. The first allocation beyond it ends the replay, and the
            remaining ticks repeat the last value.
    """
    sizes = [0]
    sizes += [block.size_bytes for block in timeline.blocks]
    live: list[int] = []
    total = peak = 0
    out_of_memory = None
    for tick, event in enumerate(signed_events(timeline)):
        if event > 0:
            size = sizes[event]
            if size and capacity_bytes is not None and total + size > capacity_bytes:
                out_of_memory = OutOfMemory(tick, size, total, total)
                live += [total] * (timeline.num_ticks - tick)
                break
            total += size
            if total > peak:
                peak = total
        elif event:
            total -= sizes[-event]
        live.append(total)
    curve = tuple(live)
    return Replay(
        allocated=curve,
        reserved=curve,
        allocated_peak_bytes=peak,
        reserved_peak_bytes=peak,
        requested_peak_bytes=peak,
        num_segments=0,
        out_of_memory=out_of_memory,
    )

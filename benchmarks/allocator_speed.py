"""How long a replay takes, measured.

Run as `PYTHONPATH=src python -m benchmarks.allocator_speed` from the root. Each row replays one synthetic timeline
several times and shows the best time, the time per event, and the ratio to a loop over the same events that does
nothing: the ratio is what compares between machines. The aim is well under 40 ms for 5,000 blocks.
"""

import random
import time
from collections.abc import Callable
from functools import partial

from memfit.allocator import replay, replay_plain
from memfit.core.replay import AllocatorOptions
from memfit.core.timeline import Block, Category, Phase, Timeline
from memfit.core.units import GIB, MIB

NUM_REPEATS = 7


def training_timeline(num_blocks: int, seed: int = 0) -> Timeline:
    """Steps of a made-up network: parameters stay, activations are freed in reverse order, temporaries at once.

    Sizes repeat from step to step, as those of a real network do; one in ten is unique.
    """
    rng = random.Random(seed)
    sizes = [int(2 ** rng.uniform(8, 25)) for _ in range(60)]
    spans: list[list[int | None]] = []
    tick = 0

    def allocate() -> list[int | None]:
        nonlocal tick
        size = rng.choice(sizes) if rng.random() < 0.9 else int(2 ** rng.uniform(8, 25))
        span: list[int | None] = [size, tick, None]
        tick += 1
        spans.append(span)
        return span

    def free(span: list[int | None]) -> None:
        nonlocal tick
        span[2] = tick
        tick += 1

    for _ in range(num_blocks // 20):
        allocate()
    activations: list[list[int | None]] = []
    depth = max(1, num_blocks // 30)
    while len(spans) < num_blocks:
        if len(activations) < depth:
            temporary = allocate()
            activations.append(allocate())
            free(temporary)
        else:
            while activations:
                gradient = allocate()
                free(activations.pop())
                free(gradient)
    blocks = tuple(Block(size or 0, start or 0, end, Category.TEMPORARY, Phase.FORWARD) for size, start, end in spans)
    return Timeline(blocks, tick)


def random_timeline(num_blocks: int, seed: int = 0) -> Timeline:
    """Random sizes and lifetimes: the most fragmented free lists, worse than any real step."""
    rng = random.Random(seed)
    starts: list[tuple[int, int]] = []
    ends: dict[int, int] = {}
    live: list[int] = []
    tick = 0
    while len(starts) < num_blocks:
        if live and rng.random() < 0.48:
            ends[live.pop(rng.randrange(len(live)))] = tick
        else:
            live.append(len(starts))
            starts.append((int(2 ** rng.uniform(8, 26)), tick))
        tick += 1
    blocks = tuple(
        Block(size, start, ends.get(index), Category.TEMPORARY, Phase.FORWARD)
        for index, (size, start) in enumerate(starts)
    )
    return Timeline(blocks, tick)


def best_seconds(action: Callable[[], object]) -> float:
    """Shortest of several runs."""
    best = float("inf")
    for _ in range(NUM_REPEATS):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best


def do_nothing(timeline: Timeline) -> int:
    """Number of events, counted one by one: the floor of any replay in Python."""
    count = 0
    for _index, _is_allocation in timeline.events():
        count += 1
    return count


def smallest_capacity(timeline: Timeline) -> int:
    """Bytes that just suffice, to a thousandth: the cache has to be released often."""
    peak_bytes = replay(timeline).reserved_peak_bytes
    permille = next(
        n for n in range(950, 1001) if replay(timeline, capacity_bytes=peak_bytes * n // 1000).out_of_memory is None
    )
    return peak_bytes * permille // 1000


def main() -> None:
    """Print the table."""
    timelines = {
        "training, 5,000 blocks": training_timeline(5_000),
        "training, 30,000 blocks": training_timeline(30_000),
        "random, 5,000 blocks": random_timeline(5_000),
        "random, 30,000 blocks": random_timeline(30_000),
    }
    tight_bytes = {id(timeline): smallest_capacity(timeline) for timeline in timelines.values()}
    modes: dict[str, Callable[[Timeline], object]] = {
        "default": replay,
        "tight capacity": lambda timeline: replay(timeline, capacity_bytes=tight_bytes[id(timeline)]),
        "max_split 128 MiB, gc 0.8": lambda timeline: replay(
            timeline, AllocatorOptions(max_split_size_bytes=128 * MIB, garbage_collection_threshold=0.8), 80 * GIB
        ),
        "expandable segments": lambda timeline: replay(timeline, AllocatorOptions(expandable_segments=True)),
        "plain": replay_plain,
    }
    print(f"{'timeline':26}{'mode':28}{'events':>8}{'ms':>9}{'us/event':>10}{'x no-op':>9}")
    for name, timeline in timelines.items():
        num_events = do_nothing(timeline)
        floor = best_seconds(partial(do_nothing, timeline))
        for mode, run in modes.items():
            seconds = best_seconds(partial(run, timeline))
            print(
                f"{name:26}{mode:28}{num_events:>8}{seconds * 1e3:>9.2f}"
                f"{seconds / num_events * 1e6:>10.2f}{seconds / floor:>9.1f}"
            )


if __name__ == "__main__":
    main()

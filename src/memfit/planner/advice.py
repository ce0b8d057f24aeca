"""Which changes would save most: every move is replayed on the timeline at hand, and the best are named."""

from collections.abc import Callable

from memfit.allocator import replay as replay_timeline
from memfit.core.dryrun import Advice
from memfit.core.replay import AllocatorOptions, Replay
from memfit.core.timeline import Timeline
from memfit.planner import activation_moves, lifetime_moves, state_moves
from memfit.planner.move import Move, Situation

MIN_SHARE = 0.01
"""Of the peak: what saves less is not worth a line."""

MOVES: tuple[Callable[[Situation], Move | None], ...] = (
    activation_moves.halve_micro_batch,
    activation_moves.checkpoint_units,
    activation_moves.autocast,
    lifetime_moves.free_gradients,
    lifetime_moves.free_leftovers,
    lifetime_moves.expand_segments,
    state_moves.fuse_optimizer,
    state_moves.shrink_states,
    state_moves.shard,
)
"""Every change that is tried."""


def advise(
    timeline: Timeline,
    replay: Replay,
    options: AllocatorOptions,
    limit: int = 3,
    *,
    context_bytes: int = 0,
    num_parameters: int = 0,
    num_devices: int = 1,
) -> tuple[Advice, ...]:
    """The changes that would save most at the peak, each taken alone, best first.

    Args:
        timeline: of the whole step, as an unlimited device would run it.
        replay: what that device made of it.
        options: settings of the allocator.
        limit: at most so many.
        context_bytes: memory of the CUDA context, which nothing saves.
        num_parameters: elements of all parameters, from which their width follows; 0 when unknown.
        num_devices: devices in use.
    """
    # Both sides of each difference come from the same replay, so that what the run did beside the timeline, such as
    # releasing the cache by hand, doesn't count as a saving.
    before = replay_timeline(timeline, options).reserved_peak_bytes
    found = []
    for make in MOVES:
        move = make(Situation(timeline, options, num_parameters, num_devices))
        if move is None:
            continue
        saves = before - replay_timeline(move.timeline, move.options).reserved_peak_bytes
        saves = min(saves, replay.reserved_peak_bytes)
        if saves > 0 and saves >= MIN_SHARE * replay.reserved_peak_bytes:
            peak_bytes = replay.reserved_peak_bytes - saves + context_bytes
            found.append(Advice(move.title, saves, peak_bytes, move.keeps, move.how, move.origin))
    found.sort(key=lambda advice: (-advice.saves_bytes, advice.title))
    return tuple(found[:limit])

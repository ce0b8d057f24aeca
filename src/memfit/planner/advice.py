"""Which changes would save most: every move is replayed on the timeline at hand, and the best are tried and named."""

from collections.abc import Callable

from memfit.allocator import replay as replay_timeline
from memfit.core.device import Origin
from memfit.core.dryrun import Advice
from memfit.core.replay import Replay
from memfit.planner.timeline_moves import HALF, HALF_TWICE, MOVES, Move, Situation

MIN_SHARE = 0.01
"""Of the peak: what saves less is not worth a line."""


def advise(
    situation: Situation,
    replay: Replay,
    limit: int = 3,
    *,
    context_bytes: int = 0,
    peak_with: Callable[[Move], int | None] = lambda move: None,
) -> tuple[Advice, ...]:
    """The changes that would save most at the peak, each taken alone, best first.

    Args:
        situation: the whole step, as an unlimited device would run it.
        replay: what that device made of it.
        limit: at most so many; half a batch, in one update or two, counts once.
        context_bytes: memory of the CUDA context, which nothing saves.
        peak_with: what a run with a move in force needs; None where there is none, so that what was computed counts.
    """
    # Both sides of each difference come from the same replay, so that what the run did beside the timeline, such as
    # releasing the cache by hand, doesn't count as a saving.
    before = replay_timeline(situation.timeline, situation.options).reserved_peak_bytes
    live, most = situation.timeline.peak()[1], replay.reserved_peak_bytes
    computed: list[tuple[int, Move]] = []
    for make in MOVES:
        move = make(situation)
        if move is None:
            continue
        saves = min(before - replay_timeline(move.timeline, move.options).reserved_peak_bytes, most)
        if move.origin is Origin.ASSUMED:
            # Where sizes are guessed, gaps that happen to close between them are no saving to count on.
            saves = min(saves, live - move.timeline.peak()[1])
        computed.append((saves, move))
    computed.sort(key=lambda pair: (-pair[0], pair[1].title))
    advices: dict[str, Advice] = {}
    counted: set[object] = set()
    for saves, move in computed:
        # The ways to run half a batch have the same settings.
        kind = move.settings or move.title
        if not _is_worth(saves, most) or (kind not in counted and len(counted) == limit):
            continue
        run = None if move.settings is None else peak_with(move)
        # A run has the last word, also where the move turns out to save nothing.
        saves = saves if run is None else most + context_bytes - run
        if _is_worth(saves, most):
            origin = move.origin if run is None else Origin.SIMULATED
            counted.add(kind)
            advices[move.title] = Advice(move.title, saves, most + context_bytes - saves, move.keeps, move.how, origin)
    plain, accumulated = advices.get(HALF), advices.get(HALF_TWICE)
    if plain is not None and accumulated is not None:
        # One way to run half a batch is left where two tell no more, or where only one was run.
        if plain.origin is not accumulated.origin:
            del advices[(plain if accumulated.origin is Origin.SIMULATED else accumulated).title]
        elif abs(plain.saves_bytes - accumulated.saves_bytes) < MIN_SHARE * most:
            # Accumulating costs next to nothing here, and keeps the batch.
            del advices[plain.title]
    return tuple(sorted(advices.values(), key=lambda advice: (-advice.saves_bytes, advice.title)))


def _is_worth(saves_bytes: int, peak_bytes: int) -> bool:
    return saves_bytes > 0 and saves_bytes >= MIN_SHARE * peak_bytes

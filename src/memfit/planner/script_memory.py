"""Memory of a script's run under other settings, computed from the timeline of one dry run.

Every move turns a timeline into another (`timeline_moves`), so that moves combine by
applying one after the other, always in the same order. What the allocator makes of the last timeline is the answer. It
is as good as the moves are; a second run of the script with the settings in force has the last word.
"""

from dataclasses import replace

from memfit.allocator import replay
from memfit.core.dryrun import Seen
from memfit.core.estimate import Estimate
from memfit.core.replay import AllocatorOptions, Replay
from memfit.core.settings import OptimizerKernels, OptimizerState, Settings
from memfit.core.timeline import Category, Phase, Timeline
from memfit.planner import timeline_moves
from memfit.planner.moves import AUTOCAST, CHECKPOINT, EIGHT_BIT, EXPANDABLE, FUSED, MICRO_BATCH, SET_TO_NONE, SHARD
from memfit.planner.timelines import AS_IT_IS, Situation, has_batch_norm, repeated_units, unit_of

_MAKE = {
    FUSED: timeline_moves.fuse_optimizer,
    SET_TO_NONE: timeline_moves.free_gradients,
    AUTOCAST: timeline_moves.autocast,
    MICRO_BATCH: timeline_moves.halve_micro_batch,
    EIGHT_BIT: timeline_moves.shrink_states,
    SHARD: timeline_moves.shard,
    EXPANDABLE: timeline_moves.expand_segments,
}
# Timelines of this many settings are kept.
_MAX_KEPT = 64


class ScriptMemory:
    """What a device must provide for a script, by settings."""

    def __init__(
        self, estimate: Estimate, options: AllocatorOptions, num_devices: int = 1, seen: Seen | None = None
    ) -> None:
        self._estimate = estimate
        timeline = estimate.timeline
        seen = seen or Seen()
        self._plain = Situation(
            timeline, options, estimate.num_parameters, num_devices, seen.batch_size, seen.autocast, seen.fusable
        )
        self._level = timeline_moves.level_of_units(timeline)
        self.units = () if self._level is None else tuple(repeated_units(timeline, self._level))
        self.has_batch_norm = has_batch_norm(timeline)
        self.has_dropout = any("dropout" in b.op or "bernoulli" in b.op for b in timeline.blocks)
        # Given back by hand in between, or the like: what the run did beside its timeline.
        self._beside = estimate.reserved_peak_bytes - replay(timeline, options).reserved_peak_bytes
        self._steps: dict[tuple[str, ...], tuple[Timeline, AllocatorOptions] | None] = {(): (timeline, options)}
        self._peaks: dict[Settings, int] = {AS_IT_IS: estimate.peak_bytes}
        self._last: tuple[Settings, Timeline] = (AS_IT_IS, timeline)

    def offers(self, name: str) -> bool:
        """Whether a move can be made at all."""
        return bool(self.units) if name == CHECKPOINT else self._after((name,)) is not None

    def unit_bytes(self) -> dict[str, int]:
        """Bytes that each unit keeps for the backward pass in the first step."""
        found = dict.fromkeys(self.units, 0)
        for block in self._estimate.timeline.blocks:
            if block.category is Category.ACTIVATION and block.phase is Phase.FORWARD and self._level is not None:
                unit = unit_of(block.module, self._level)
                if unit in found:
                    found[unit] += block.size_bytes
        return found

    def timeline(self, settings: Settings) -> tuple[Timeline, AllocatorOptions]:
        """The run under these settings; moves that change nothing are skipped."""
        steps = [
            (FUSED, settings.kernels is not OptimizerKernels.KEEP),
            (SET_TO_NONE, settings.set_to_none),
            (AUTOCAST, settings.precision is not None),
            *[(MICRO_BATCH, True)] * (settings.micro_batches.bit_length() - 1),
            (EIGHT_BIT, settings.state is OptimizerState.EIGHT_BIT),
            (SHARD, settings.num_devices > 1),
            (EXPANDABLE, settings.expandable_segments),
        ]
        names: tuple[str, ...] = ()
        for name, is_used in steps:
            if is_used and self._after((*names, name)) is not None:
                names = (*names, name)
        found = self._after(names)
        assert found is not None
        timeline, options = found
        if settings.checkpoint and self._level is not None:
            # The allocator's own settings leave the timeline as it is, and come right after each other.
            key = replace(settings, expandable_segments=False)
            if self._last[0] != key:
                chosen = set(settings.checkpoint)
                self._last = (key, timeline_moves.checkpointed(timeline, chosen, self._level))
            timeline = self._last[1]
        return timeline, options

    def _after(self, names: tuple[str, ...]) -> tuple[Timeline, AllocatorOptions] | None:
        if names not in self._steps:
            before = self._after(names[:-1])
            situation = None if before is None else replace(self._plain, timeline=before[0], options=before[1])
            move = None if situation is None else _MAKE[names[-1]](situation)
            if len(self._steps) >= _MAX_KEPT:
                self._steps = {(): self._steps[()]}
            self._steps[names] = None if move is None else (move.timeline, move.options)
        return self._steps[names]

    def at_least(self, settings: Settings) -> int:
        """Bytes below which these settings can't be: what is alive at once."""
        if settings in self._peaks:
            return self._peaks[settings]
        timeline, _ = self.timeline(settings)
        return timeline.peak()[1] + min(0, self._beside) + self._estimate.context_bytes

    def peak(self, settings: Settings) -> int:
        """What the device must provide."""
        if settings not in self._peaks:
            timeline, options = self.timeline(settings)
            self._peaks[settings] = self._provided(timeline, replay(timeline, options))
        return self._peaks[settings]

    def _provided(self, timeline: Timeline, replayed: Replay) -> int:
        return max(replayed.reserved_peak_bytes + self._beside, timeline.peak()[1]) + self._estimate.context_bytes

    def estimate(self, settings: Settings) -> Estimate:
        """The whole estimate under these settings."""
        if settings == AS_IT_IS:
            return self._estimate
        timeline, options = self.timeline(settings)
        replayed = replay(timeline, options)
        reserved = self._provided(timeline, replayed) - self._estimate.context_bytes
        live = timeline.without_optional().peak()[1]
        return replace(
            self._estimate,
            timeline=timeline,
            replay=replace(replayed, reserved_peak_bytes=reserved),
            lower_bytes=min(live, reserved) + self._estimate.context_bytes,
            upper_bytes=reserved + self._estimate.context_bytes,
        )

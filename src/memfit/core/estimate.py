"""The answer of `memfit.estimate`: what a step needs, where it goes, and how sure that is."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from memfit.core.device import Device, Origin
from memfit.core.errors import BadInput
from memfit.core.replay import Replay
from memfit.core.reporters import Reported, Reporters
from memfit.core.spread import Spread, cache_spread, capacity_width, combined, probability
from memfit.core.timeline import Block, Timeline
from memfit.core.typed_data import Saved, made_of
from memfit.core.units import format_size

DRY_RUN = "dry run"
"""The mode of an estimate that is the record of a whole program."""
CONTEXT = "CUDA context"
OTHER_PROCESSES = "other processes"
PAGED_STATE = "paged optimizer state (simulated)"
"""A part of the host's memory."""
CACHED = "allocator rounding, cache and fragmentation"
ROOT_MODULE = "(model)"
UNKNOWN_SOURCE = "(framework)"


@dataclass(frozen=True, slots=True)
class Note:
    """Something the estimate had to assume, or that the user should know.

    Args:
        code: stable name of the rule, "data-dependent-shape".
        text: what happened and what was assumed.
        source: line of the user's code, or "".
    """

    code: str
    text: str
    source: str = ""


AT_MOST = "peak-at-most"
"""Code of the note that tensors at the peak are as large as they can be."""

NOT_COMPILED = "not-compiled"
CACHE_RELEASED = "cache-released"
"""Code of the note that the allocator had to give back its cache."""

WORKSPACE_DROPPED = "workspace-dropped"
"""Code of the note that cuDNN had to do without workspaces."""

LACKS_PRECISION = "device-lacks-precision"
"""Code of the notes on a precision that the device has no fast arithmetic or no lean kernels for."""

# A smaller share of the peak doesn't make it an upper bound.
_AT_MOST_SHARE = 0.01


def at_most_notes(timeline: Timeline) -> tuple[Note, ...]:
    """Says how much of the peak depends on data, where that is enough to tell."""
    tick, peak_bytes = timeline.peak()
    bounded = sum(block.size_bytes for block in timeline.live_at(tick) if block.at_most)
    if not bounded or bounded < _AT_MOST_SHARE * peak_bytes:
        return ()
    return (Note(AT_MOST, f"{format_size(bounded)} at the peak depend on data and are the most that they can be"),)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What the host must hold for the step, by part; every part is an assumption spelled out in `parts`."""

    parts: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Sum of all parts."""
        return sum(self.parts.values())

    @classmethod
    def from_json(cls, parts: Any) -> "HostMemory":
        """What an estimate's file has of it: the parts."""
        return made_of(cls, [parts])


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long one step takes on the device, in seconds.

    Args:
        seconds: with data at hand, and nothing else running on the device.
        lower_seconds: in 95 of 100 steps of other models the measured time lay between this, in proportion,
        upper_seconds: and this.
        origin: how it is known.
    """

    seconds: float
    lower_seconds: float
    upper_seconds: float
    origin: Origin = Origin.SIMULATED


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Bytes at the peak, by four views. Each view adds up to `Estimate.peak_bytes`."""

    by_category: dict[str, int]
    by_module: dict[str, int]
    by_op: dict[str, int]
    by_source: dict[str, int]


@dataclass(frozen=True, repr=False)
class Estimate(Saved, Reported):
    """Peak memory of one training or inference step on a device.

    Args:
        subject: what was estimated, such as the model's class name.
        device: the target.
        mode: "training" or "inference".
        precision: as given, or "as given".
        batch_size: first dimension of the batch, or None when its tensors share none.
        timeline: every allocation of the traced steps.
        replay: what the allocator made of it; where it doesn't fit, what an unlimited device would, with the failure
            noted.
        context_bytes: memory of the CUDA context.
        certain_bytes: the device can't do with less, whatever sizes that depend on data turn out to be.
        tight_bytes: what is enough where the allocator gives back its cache and cuDNN does without workspaces.
        host: what the host must hold.
        notes: assumptions made on the way.
        spreads: what is assumed, and how far off each part may be; `all_spreads` has the cache as well.
        num_parameters: elements of all parameters.
        state_bytes: parameters, buffers, gradients and optimizer state, each in full, by category.
        batch_bytes: the batch of one step.
        seconds: how long the estimate took.
        time: how long the step takes; None where that is unknown.
        other_bytes: what other processes held on the device when all together held most; the timeline is that of one.
    """

    reporters: ClassVar = Reporters[Any]()
    saved_as = "estimate", "an estimate"

    subject: str
    device: Device
    mode: str
    precision: str
    batch_size: int | None
    timeline: Timeline
    replay: Replay
    context_bytes: int
    certain_bytes: int
    tight_bytes: int
    host: HostMemory
    notes: tuple[Note, ...] = ()
    spreads: tuple[Spread, ...] = field(default=(), compare=False)  # a file has the cache among them
    num_parameters: int = 0
    state_bytes: dict[str, int] = field(default_factory=dict)
    batch_bytes: int = 0
    seconds: float = 0.0
    other_bytes: int = 0
    time: StepTime | None = None
    rescale: "Callable[[int], Estimate] | None" = field(default=None, compare=False, repr=False)
    """Answers for another batch size; set by the one who traced, gone after a round trip through JSON."""
    vary: Callable[[], Sequence[Replay]] | None = field(default=None, compare=False, repr=False)
    """Replays the step with other places and sizes of what libraries take; run when an interval is asked for."""

    def summary(self) -> str:
        """The peak, the device, and whether it fits."""
        verdict = {True: "fits", False: "does not fit", None: "capacity unknown"}[self.fits]
        return f"of {self.subject}: {format_size(self.peak_bytes)} on {self.device.name}, {verdict}"

    def at_batch(self, batch_size: int) -> "Estimate":
        """The estimate at another batch size; the step is traced again only where the known traces don't suffice."""
        if self.rescale is None:
            raise BadInput(
                "this estimate can't be moved to another batch size: its batch has no common first dimension, or it "
                "was read from a file. Estimate the job again with the batch size wanted."
            )
        return self.rescale(batch_size)

    @property
    def is_at_most(self) -> bool:
        """Whether the peak is an upper bound, because sizes depend on data."""
        return any(note.code == AT_MOST for note in self.notes)

    @property
    def allocated_peak_bytes(self) -> int:
        """Greatest sum of live blocks, as `torch.cuda.max_memory_allocated` counts them."""
        return self.replay.allocated_peak_bytes

    @property
    def reserved_peak_bytes(self) -> int:
        """Greatest memory taken from the device by the allocator, as `torch.cuda.max_memory_reserved` counts it."""
        return self.replay.reserved_peak_bytes

    @property
    def peak_bytes(self) -> int:
        """What the device must provide: reserved memory, the CUDA context, and what other processes hold."""
        return self.reserved_peak_bytes + self.context_bytes + self.other_bytes

    @property
    def capacity_bytes(self) -> int | None:
        """What the device can provide; None when unknown."""
        return self.device.usable_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the step runs on the device; None when its capacity is unknown."""
        if self.replay.out_of_memory is not None:
            return False
        return None if self.capacity_bytes is None else self.peak_bytes <= self.capacity_bytes

    @cached_property
    def all_spreads(self) -> tuple[Spread, ...]:
        """Everything that is assumed, and how far off each part may be."""
        return self.spreads if self.vary is None else (*self.spreads, cache_spread(self.replay, self.vary()))

    @property
    def interval_bytes(self) -> tuple[int, int]:
        """(least, most) that the device must provide in 19 of 20 cases, if sizes that depend on data are as assumed."""
        peak_bytes = self.peak_bytes
        least = peak_bytes - combined(spread.below_bytes for spread in self.all_spreads)
        most = peak_bytes + combined(spread.above_bytes for spread in self.all_spreads)
        # What can't be given back is always there.
        fixed = self.tight_bytes - combined(spread.below_bytes for spread in self.spreads if spread.decides)
        if self.replay.num_retries and self.capacity_bytes is not None and self.fits:
            # The allocator has taken what there is.
            most = max(peak_bytes, min(most, self.capacity_bytes))
        return round(max(0, least, min(fixed, peak_bytes))), round(most)

    @property
    def fit_probability(self) -> float | None:
        """How sure it is that the step runs on the device, from 0.01 to 0.99; None when its capacity is unknown.

        Sizes that depend on data are taken to be the largest that they can be.
        """
        if self.capacity_bytes is None:
            return None
        margin: float = self.capacity_bytes - self.tight_bytes
        if self.mode == DRY_RUN and self.replay.out_of_memory is not None:
            # A program that broke off needs more, and nobody knows how much.
            margin = -math.inf
        elif not self.fits:
            # What is allocated would fit, and still a replay has found no place for it.
            margin = min(0, margin)
        widths = [
            spread.above_bytes if margin >= 0 else spread.below_bytes for spread in self.spreads if spread.decides
        ]
        return probability(margin, combined([*widths, capacity_width(self.device)]))

    @cached_property
    def peak_tick(self) -> int:
        """Tick of the timeline at which most is allocated."""
        allocated = self.replay.allocated
        return allocated.index(max(allocated)) if allocated else 0

    @cached_property
    def breakdown(self) -> Breakdown:
        """Where every byte of the peak goes."""
        tick, timeline = self.peak_tick, self.timeline
        live_bytes = sum(block.size_bytes for block in timeline.live_at(tick))
        rest = {
            CACHED: self.reserved_peak_bytes - live_bytes,
            CONTEXT: self.context_bytes,
            OTHER_PROCESSES: self.other_bytes,
        }
        rest = {name: size for name, size in rest.items() if size}
        return Breakdown(
            by_category=timeline.breakdown(tick, lambda b: str(b.category)) | rest,
            by_module=timeline.breakdown(tick, lambda b: b.module or ROOT_MODULE) | rest,
            by_op=timeline.breakdown(tick, lambda b: b.op) | rest,
            by_source=timeline.breakdown(tick, _source_of(timeline)) | rest,
        )

    @cached_property
    def peak_block(self) -> Block | None:
        """The block whose allocation reached the peak."""
        return next((b for b in self.timeline.blocks if b.start == self.peak_tick), None)

    @property
    def moment(self) -> str:
        """When the peak is reached, in words."""
        block = self.peak_block
        return "nothing is allocated" if block is None else self.moment_of(block)

    def moment_of(self, block: Block) -> str:
        """When a block is allocated, in words: phase, operator, size, module and line."""
        mark = self.timeline.mark_at(block.start)
        words = f"in the {mark.phase} pass" if mark.phase in ("forward", "backward") else f"in {mark.phase}"
        if mark.phase == "optimizer":
            words = "in the optimizer step"
        if mark.step:
            words += f" of step {mark.step}"
        words += f", at {block.op or 'an allocation'} ({format_size(block.size_bytes)})"
        if block.module:
            words += f" in {block.module}"
        if block.source:
            words += f", {block.source}"
        return words

    def to_json(self) -> dict[str, Any]:
        """A plain structure that `json` can write, and `from_json` read back."""
        bare = replace(self, timeline=Timeline((), 0), spreads=self.all_spreads, rescale=None, vary=None)
        plain = Saved.to_json(bare)
        del plain["rescale"], plain["vary"]
        return {
            **plain,
            "peak_bytes": self.peak_bytes,
            "allocated_peak_bytes": self.allocated_peak_bytes,
            "reserved_peak_bytes": self.reserved_peak_bytes,
            "capacity_bytes": self.capacity_bytes,
            "fits": self.fits,
            "fit_probability": self.fit_probability,
            "interval_bytes": list(self.interval_bytes),
            "moment": self.moment,
            "breakdown": asdict(self.breakdown),
            "host": self.host.parts,
            "origin": {
                "peak_bytes": Origin.SIMULATED.value,
                "capacity_bytes": self.device.usable_origin.value,
                "context_bytes": self.device.context_origin.value,
                **({} if self.time is None else {"time": self.time.origin.value}),
            },
            "timeline": self.timeline.to_json(),
        }


def _source_of(timeline: Timeline) -> Callable[[Block], str]:
    """The line of code of a block; its layer where the model is made of the framework's layers alone."""
    if any(block.source for block in timeline.blocks):
        return lambda block: block.source or UNKNOWN_SOURCE
    return lambda block: f"(framework) in {block.module}" if block.module else UNKNOWN_SOURCE

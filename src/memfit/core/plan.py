"""The answer of `memfit.plan`: how to run a step so that it fits, what each part of that saves and costs."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from memfit.core.device import Device, Origin
from memfit.core.errors import MemfitError
from memfit.core.estimate import Estimate, Note
from memfit.core.reporters import Reported, Reporters, not_there, written
from memfit.core.settings import Keeps, Settings
from memfit.core.typed_data import Saved
from memfit.core.units import format_size


@dataclass(frozen=True, slots=True)
class Seconds:
    """A time with its origin; None seconds where nothing is known about the device's speed."""

    seconds: float | None
    origin: Origin = Origin.ASSUMED


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """One move of a plan.

    Args:
        name: stable name, such as "checkpoint"; what `allow` takes.
        title: the move in words, "recompute 7 of 12 blocks".
        keeps: what it does to the numbers.
        saves_bytes: peak without this move, less the peak of the whole plan. Negative where the move buys time.
        saves_origin: simulated where a trace without it was made, assumed otherwise.
        costs_seconds: time of a step with the whole plan, less the time without this move; None where unknown.
        costs_origin: of that time.
        caveat: what differs or must be known, or "".
    """

    name: str
    title: str
    keeps: Keeps
    saves_bytes: int
    saves_origin: Origin
    costs_seconds: float | None
    costs_origin: Origin
    caveat: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """One plan of the front: nothing known needs less memory in no more time.

    `label` names the moves in a few words; where not `verified` by a trace with them applied, the peak is computed.
    """

    peak_bytes: int
    seconds: float | None
    label: str
    settings: Settings
    verified: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """A move that was not considered, and why; `allowed_by` is the word in `allow` that permits it."""

    name: str
    reason: str
    allowed_by: str = ""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Figures of a step on a device.

    Args:
        peak_bytes: what the device must provide.
        allocated_bytes: greatest sum of live blocks.
        by_category: bytes at the peak.
        host_bytes: further host memory, for what waits there.
        origin: simulated where a run or a trace of this very step gave the figures, assumed where they are computed.
    """

    peak_bytes: int
    allocated_bytes: int
    by_category: dict[str, int]
    host_bytes: int = 0
    origin: Origin = Origin.SIMULATED

    @classmethod
    def of(cls, estimate: Estimate, host_bytes: int = 0, origin: Origin = Origin.SIMULATED) -> "Footprint":
        """The figures of an estimate."""
        by_category = estimate.breakdown.by_category
        return cls(estimate.peak_bytes, estimate.allocated_peak_bytes, by_category, host_bytes, origin)


class _Actions(Reporters["Plan"]):
    """What a plan does beyond holding figures; set by the part that knows frameworks and reports."""

    def __init__(self) -> None:
        super().__init__()
        self.code: Callable[[Plan], str] = not_there
        self.apply: Callable[[Plan, Any, Any], Any] = not_there


actions = _Actions()


@dataclass(frozen=True, repr=False)
class Plan(Saved, Reported):
    """How to run a step so that it fits, as fast as is known.

    Args:
        subject: what was planned, such as the model's class name.
        device: the target.
        budget_bytes: what the step may take of it.
        batch_size: samples of one update; None when the batch has no common first dimension.
        settings: how to run the step.
        moves: what `settings` change, in order of saving.
        before: the step as it is.
        after: the step as planned, from a trace with the moves applied where its origin says so.
        seconds_before: time of a step as it is.
        seconds_after: time of a step as planned.
        front: the best plans for every budget, largest memory first.
        refused: moves that were not considered.
        notes: assumptions made on the way.
        planned_in_seconds: how long the search took.
        framework: what runs the step: "torch", "jax", or "keras:" and its backend.
        fit_probability: how sure it is that the step as planned runs within the budget, from 0.01 to 0.99; None where
            nobody knows.
        estimate_before: the whole estimate; None after a round trip through JSON.
        estimate_after: the same of the planned step.
    """

    reporters: ClassVar = actions
    saved_as = "plan", "a plan"
    how_to_get = "Give a file that plan.save wrote."

    subject: str
    device: Device
    budget_bytes: int
    batch_size: int | None
    settings: Settings
    moves: tuple[PlannedMove, ...]
    before: Footprint
    after: Footprint
    seconds_before: Seconds
    seconds_after: Seconds
    front: tuple[Point, ...] = ()
    refused: tuple[Refusal, ...] = ()
    notes: tuple[Note, ...] = ()
    planned_in_seconds: float = 0.0
    framework: str = "torch"
    fit_probability: float | None = None
    estimate_before: Estimate | None = field(default=None, compare=False)
    estimate_after: Estimate | None = field(default=None, compare=False)

    def summary(self) -> str:
        """The peak, the budget, the device, and how much it takes to get there."""
        pace = "" if self.slowdown is None else f", {self.slowdown:.2f} times as long"
        moves = "1 move" if len(self.moves) == 1 else f"{len(self.moves)} moves"
        return (
            f"of {self.subject}: {format_size(self.after.peak_bytes)} of {format_size(self.budget_bytes)} "
            f"on {self.device.name}, {moves}{pace}"
        )

    @property
    def fits(self) -> bool:
        """Whether the planned step stays within the budget."""
        return self.after.peak_bytes <= self.budget_bytes

    @property
    def keeps(self) -> Keeps:
        """What the whole plan does to the numbers: the most that one of its moves does."""
        order = list(Keeps)
        return max((move.keeps for move in self.moves), key=order.index, default=Keeps.EXACT)

    @property
    def slowdown(self) -> float | None:
        """Time of the planned step over that of the plain one; None where unknown."""
        before, after = self.seconds_before.seconds, self.seconds_after.seconds
        return None if not before or after is None else after / before

    def apply(self, model: Any, optimizer: Any = None) -> Any:
        """Puts the moves into practice on the live objects.

        Returns a `Fitted`, whose `step` runs one update; for Keras a `FittedModel`, whose model then fits as planned;
        for JAX the step itself, which takes (params, state, batch).

        Args:
            model: the module that was planned for, or one of the same structure; for JAX the loss function.
            optimizer: over its parameters; may be None for a plan without an optimizer, and for Keras.
        """
        return actions.apply(self, model, optimizer)

    def code(self) -> str:
        """The few plain lines of the framework that do the same without memfit."""
        return actions.code(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, whole or not at all."""
        written(lambda: actions.write_json(self.to_json(), os.fspath(path)), "plan", path)

    def to_json(self) -> dict[str, Any]:
        """A plain structure that `json` can write, and `from_json` read back."""
        plain = Saved.to_json(replace(self, estimate_before=None, estimate_after=None))
        del plain["estimate_before"], plain["estimate_after"]
        return {**plain, "fits": self.fits, "keeps": self.keeps.value}


class PlanNotFound(MemfitError):
    """No plan fits; `smallest` is the one that needs least.

    Args:
        message: what was wanted, what the smallest needs, what is left in it, what to do.
        smallest: the plan that comes nearest; None where not even that could be traced.
        device_name: the cheapest device of the catalogue that would do, or "".
    """

    exit_code = 3

    def __init__(self, message: str, smallest: Plan | None = None, device_name: str = "") -> None:
        super().__init__(message)
        self.smallest = smallest
        self.device_name = device_name

"""What a move is: a change to a training step, and the timeline that the step would have after it."""

from dataclasses import dataclass, replace
from typing import Any

from memfit.core.device import Origin
from memfit.core.replay import AllocatorOptions
from memfit.core.settings import Keeps, Settings
from memfit.core.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Situation:
    """What the moves start from.

    Args:
        timeline: of the step as it is.
        options: of its allocator.
        num_parameters: elements of all parameters; 0 when nobody counted.
        num_devices: devices that the step runs on.
        batch_size: samples of a batch; None when unknown.
        uses_autocast: whether autocast is on already.
        is_fusable: whether the optimizers have fused kernels.
        autocast: the precision that the device is good at.
    """

    timeline: Timeline
    options: AllocatorOptions
    num_parameters: int = 0
    num_devices: int = 1
    batch_size: int | None = None
    uses_autocast: bool = False
    is_fusable: bool = True
    autocast: str = "amp-bf16"

    def move(
        self,
        title: str,
        keeps: Keeps,
        how: str,
        timeline: Timeline,
        origin: Origin = Origin.ASSUMED,
        **settings: Any,
    ) -> "Move":
        """The move to another timeline; `settings` are those that a run of the script can have in force, if any."""
        in_force = replace(AS_IT_IS, **settings) if settings else None
        return Move(title, keeps, how, origin, timeline, self.options, in_force)


AS_IT_IS = Settings(set_to_none=False)
"""The script unchanged: `set_to_none` means here that gradients are dropped right after each update."""


@dataclass(frozen=True, slots=True)
class Move:
    """One change.

    Args:
        title: the change in words.
        keeps: what it does to the numbers.
        how: one line of code or the setting.
        origin: simulated where only the order of events or the allocator differs, assumed where sizes are guessed.
        timeline: of the step after the change.
        options: of its allocator after the change.
        settings: the change as a run of the script can have it in force; None where that takes another script, or where
            a replay of the same events tells as much.
        accumulates: whether the micro-batches of the settings make up one update.
    """

    title: str
    keeps: Keeps
    how: str
    origin: Origin
    timeline: Timeline
    options: AllocatorOptions
    settings: Settings | None = None
    accumulates: bool = True

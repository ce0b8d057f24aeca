"""What a move is: a change to a training step, and the timeline that the step would have after it."""

from dataclasses import dataclass

from memfit.core.device import Origin
from memfit.core.replay import AllocatorOptions
from memfit.core.settings import Keeps
from memfit.core.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Situation:
    """What the moves start from.

    Args:
        timeline: of the step as it is.
        options: of its allocator.
        num_parameters: elements of all parameters; 0 when nobody counted.
        num_devices: devices that the step runs on.
    """

    timeline: Timeline
    options: AllocatorOptions
    num_parameters: int = 0
    num_devices: int = 1


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
    """

    title: str
    keeps: Keeps
    how: str
    origin: Origin
    timeline: Timeline
    options: AllocatorOptions

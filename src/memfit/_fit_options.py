"""How a `fit` of Keras is guarded: what `memfit.fit`, `memfit.keras.Fit` and `memfit.Guard` are given, checked."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

from memfit.catalogue.host import resident_bytes
from memfit.core import run_events
from memfit.core.errors import BadInput
from memfit.core.guarding import CannotFit
from memfit.core.plan import Plan
from memfit.core.units import format_size, parse_size

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How a `fit` is guarded; see `fit`."""

    budget: str | int | None = None
    plan: Plan | str | None = AUTO
    checkpoint: str | os.PathLike[str] | None = None
    checkpoint_every: int | None = None
    keep: int = 3
    approximate: bool = False
    remember: bool = True
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("checkpoint_every", "keep", "micro_batch_size"):
            value = getattr(self, name)
            if value is None and name != "keep":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadInput(f"{name} must be a whole number from 1 up, but {value!r} was given.")
        if self.plan is not None and self.plan != AUTO and not isinstance(self.plan, Plan):
            raise BadInput(f"plan must be 'auto', a Plan or None, but {self.plan!r} was given.")

    @classmethod
    def check_names(cls, given: Iterable[str], of: str) -> None:
        """Refuses names that no option has.

        Args:
            given: the names.
            of: what was given them, for the message.
        """
        unknown = sorted(set(given) - set(cls.__slots__))
        if unknown:
            raise BadInput(f"{of} has no option {', '.join(unknown)}. It takes {', '.join(cls.__slots__)}.")

    def budget_bytes(self, request: run_events.RunRequest | None) -> int | None:
        """What the process may take; None: what is there."""
        if self.budget is not None:
            return parse_size(self.budget)
        return None if request is None else request.budget_bytes


def left_of(budget_bytes: int, share: float = 1.0, *, on_host: bool = True) -> int:
    """What of a budget is left for training: on the host it is for the whole process, and a part of it is taken.

    Args:
        budget_bytes: the budget.
        share: of what is left, what is asked for.
        on_host: whether it is the host's memory; that of a device is the training's alone.

    Raises:
        CannotFit: nothing is left.
    """
    held = (resident_bytes() or 0) if on_host else 0
    if held >= budget_bytes:
        text = (
            f"the process holds {format_size(held)} before the first step, and its budget, which is for all that it "
            f"holds, is {format_size(budget_bytes)}. Give a larger budget."
        )
        run_events.note("cannot fit", text=text, planned=True)
        raise CannotFit(text)
    return int((budget_bytes - held) * share)

"""Counts a script's training steps, and ends it when there have been enough.

A step is one call of an optimizer's `step`. Where a script has several optimizers (a GAN, an actor and a critic) all
must have taken the number wanted; one that is never used must not keep the run going for ever, so that five times the
number by any of them ends it too. A script that updates its parameters by hand has no optimizer: there the first
change of a parameter after a backward pass is a step, and where no such change is seen each backward pass is one.
"""

import _thread
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

_PATIENCE = 5
# Before it makes its optimizer, a program may take passes for another end: an attack, scores for pruning.
_PATIENCE_OF_PASSES = 20


class EndOfRun(SystemExit):
    """Raised in the script when it has taken the steps wanted: an orderly exit, which `except Exception` lets pass."""

    # A pool of processes pickles what ends a task: made again from its arguments.
    def __init__(self, code: int = 0) -> None:
        super().__init__(code)


def call_before_updates(action: Callable[[], None]) -> RemovableHandle:
    """Calls `action` in front of every optimizer's step, on whatever device; the handle's `remove()` ends it."""
    return register_optimizer_step_pre_hook(lambda *given, **named: action())


@dataclass(eq=False)
class StepCounter:
    """Knows how many steps have been taken."""

    wanted: int  # steps after which the run ends
    before: Callable[[Any], None] = lambda optimizer: None  # called before an optimizer's step, with the optimizer
    after: Callable[[Any], None] = lambda optimizer: None  # called after an optimizer's step, with the optimizer
    is_on: Callable[[], bool] = lambda: True  # whether the thread that runs counts
    has_optimizer: bool = False
    has_ended: bool = False  # whether the last step wanted has been taken, in whichever thread
    ended: Callable[[], None] = lambda: None  # called before the program is ended
    ignored: Callable[[], None] = lambda: None  # called when the program has caught its own end and gone on
    _taken: "weakref.WeakKeyDictionary[Any, int]" = field(default_factory=weakref.WeakKeyDictionary)
    _most: int = 0
    _num_by_hand: int = 0
    _num_backward: int = 0
    _has_new_gradients: bool = False

    @property
    def num_steps(self) -> int:
        """Steps taken: by the busiest optimizer, or updates by hand."""
        return self._most if self.has_optimizer else self._num_by_hand

    @property
    def num_passes(self) -> int:
        """Backward passes of a program that has shown neither an optimizer nor an update: its steps, in the end."""
        return 0 if self.has_optimizer or self._num_by_hand else self._num_backward

    def made(self, optimizer: Any) -> None:
        """An optimizer was made."""
        self.has_optimizer = True
        self._taken.setdefault(optimizer, 0)

    def begin_backward(self) -> None:
        """A backward pass is about to begin; ends the run where it would be one more than wanted."""
        if self.has_optimizer:
            return
        # Passes may add up to one update, which is not seen where the program makes new tensors of its parameters.
        most = _PATIENCE_OF_PASSES * self.wanted
        if self._num_by_hand >= self.wanted or (self._num_backward >= most and not self._num_by_hand):
            self._end()

    def end_backward(self) -> None:
        """A backward pass has ended."""
        self._has_new_gradients = True
        self._num_backward += 1

    def updated_by_hand(self) -> None:
        """The program has changed a parameter itself; the first time after a backward pass, that is a step."""
        if self._has_new_gradients and not self.has_optimizer:
            self._num_by_hand += 1
        self._has_new_gradients = False

    def begin_step(self, optimizer: Any, *_: Any) -> None:
        """An optimizer is about to step."""
        if not self.is_on():
            return
        self.made(optimizer)
        self.before(optimizer)

    def end_step(self, optimizer: Any, *_: Any) -> None:
        """An optimizer has stepped; ends the run where that was the last step wanted."""
        if not self.is_on():
            return
        taken = self._taken[optimizer] = self._taken.get(optimizer, 0) + 1
        self._most = max(self._most, taken)
        self.after(optimizer)
        if min(self._taken.values()) >= self.wanted or taken >= _PATIENCE * self.wanted:
            if self.has_ended:
                self.ignored()
            self._end()

    def _end(self) -> NoReturn:
        self.has_ended = True
        self.ended()
        if threading.current_thread() is not threading.main_thread():
            # It would end this thread alone.
            _thread.interrupt_main()
            raise SystemExit
        raise EndOfRun

    def watch(self) -> list[Any]:
        """Starts counting; gives handles whose `remove()` ends it."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        return [register_optimizer_step_pre_hook(self.begin_step), register_optimizer_step_post_hook(self.end_step)]

    def counting_init(self, on_made: Callable[[Any], None] = lambda optimizer: None) -> Callable[..., None]:
        """Stands in for `Optimizer.__init__`, to hear of optimizers before they step; `on_made` is called with each."""
        plain: Callable[..., None] = torch.optim.Optimizer.__init__

        def __init__(optimizer: Any, /, *args: Any, **kwargs: Any) -> None:
            plain(optimizer, *args, **kwargs)
            if self.is_on():
                self.made(optimizer)
                on_made(optimizer)

        return __init__

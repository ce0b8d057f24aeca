"""A training step of JAX that survives running out of memory.

JAX deletes donated arrays even where the program that they were given to never ran. So the step is two programs: the
first computes loss and gradients, which is where memory runs out, and donates nothing: it can be run again on the same
batch, in more parts. The second updates in place and asks for next to nothing; where its compiled form says otherwise,
it doesn't donate either. Room for what isn't made in place is asked for before it is run, see `room`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from memfit.adapters.jax.room import NoRoom, Room, beside_arguments, form_of
from memfit.adapters.jax.training import TrainStep, check_batch, divided, joined, part_size
from memfit.core.guarding import BrokenUpdate, CannotFit
from memfit.core.settings import Settings

# What an update in place may ask for and still be trusted not to fail.
_NEXT_TO_NOTHING = 1 << 20


def ran_out(error: BaseException) -> bool:
    """Whether an error of JAX says that memory ran out."""
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text or "Out of memory" in text or isinstance(error, MemoryError)


class GuardedStep:
    """A step that is run again in more parts where memory runs out.

    Args:
        loss: as for `train_step`.
        optimizer: as for `train_step`.
        settings: how it is run at first.
    """

    def __init__(self, loss: Callable[[Any, Any], Any], optimizer: Any, settings: Settings) -> None:
        self._loss = loss
        self._optimizer = optimizer
        self._steps: dict[int, TrainStep] = {}
        self._programs: dict[int, tuple[Any, Room]] = {}
        self._updates: dict[Any, Any] = {}
        self.settings = replace(settings, donate=False)
        self.num_retries = 0
        # Refuses what can't be run before the first batch.
        self._plain = TrainStep(loss, optimizer, self.settings)

    def init(self, params: Any) -> Any:
        """The optimizer's state for these parameters."""
        return self._plain.init(params)

    def __call__(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        """One update; parameters and state that were given are used up, as those of a donating step are."""
        trained, fixed, structure = divided(params)
        value, gradients = self._gradients(structure, trained, fixed, batch)
        trained, state = self._updated(trained, state, gradients)
        return joined(trained, fixed, structure), state, value

    def _gradients(self, structure: Any, trained: Any, fixed: Any, batch: Any) -> tuple[Any, Any]:
        size = check_batch(batch)
        part = part_size(self.settings, size)
        while True:
            failure = None
            num_halvings = 1
            try:
                return self._run(part, structure, trained, fixed, batch)
            except (RuntimeError, ValueError, MemoryError) as error:
                if not ran_out(error):
                    raise
                failure = " ".join(str(error).split())[:200]
                if isinstance(error, NoRoom):
                    num_halvings = _num_halvings(error)
            # Outside of the except block, whose traceback holds on to arrays.
            if size is None or part <= 1:
                raise CannotFit(
                    f"memory ran out with a single sample at a time: {failure} Parameters and state are as they were "
                    "before the step. Mark blocks with memfit.jax.block and plan with recomputation, or use a smaller "
                    "model."
                )
            part = max(1, -(-part // 2**num_halvings))
            self.num_retries += 1
            # A ceiling that was found once holds for the batches to come.
            self.settings = replace(self.settings, micro_batches=-(-size // part), micro_batch_size=part)

    def _run(self, part: int, *arguments: Any) -> tuple[Any, Any]:
        program, room = self._program(part)
        room.ask(arguments)
        # Errors of the run itself come late: not before the results are waited for.
        result: tuple[Any, Any] = jax.block_until_ready(program(*arguments))
        return result

    def _program(self, part: int) -> tuple[Any, Room]:
        if part not in self._programs:
            step = TrainStep(self._loss, self._optimizer, replace(self.settings, micro_batch_size=part))
            program = jax.jit(step.gradients, static_argnums=0)
            self._programs[part] = program, Room(program)
        return self._programs[part]

    def _updated(self, trained: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        key = form_of((trained, state))
        if key not in self._updates:
            update = jax.jit(self._plain.update, donate_argnums=(0, 1)).lower(trained, state, gradients).compile()
            memory = update.memory_analysis()
            is_in_place = memory is not None and beside_arguments(memory) <= _NEXT_TO_NOTHING
            self._updates[key] = update if is_in_place else self._update_beside()
        failure = ""
        try:
            updated: tuple[Any, Any] = jax.block_until_ready(self._updates[key](trained, state, gradients))
            return updated
        except (RuntimeError, ValueError, MemoryError) as error:
            if not ran_out(error):
                raise
            failure = " ".join(str(error).split())[:200]
        if any(leaf.is_deleted() for leaf in jax.tree.leaves((trained, state)) if isinstance(leaf, jax.Array)):
            raise BrokenUpdate(
                f"memory ran out in the update: {failure} JAX has deleted the parameters; go on from a checkpoint."
            )
        raise CannotFit(
            f"memory ran out in the update: {failure} Parameters and state are as they were before the step; the "
            "optimizer's own memory doesn't fit beside them."
        )

    def _update_beside(self) -> Callable[..., Any]:
        """An update that leaves the old values where they are."""
        update = jax.jit(self._plain.update)
        room = Room(update)

        def run(*arguments: Any) -> Any:
            room.ask(arguments)
            return update(*arguments)

        return run


def _num_halvings(found: NoRoom) -> int:
    """How often a batch has to be halved at least: what doesn't depend on its size only makes it more.

    >>> _num_halvings(NoRoom(wanted_bytes=900, free_bytes=240))
    2
    """
    number = 1
    while found.wanted_bytes >> number > max(found.free_bytes, 1):
        number += 1
    return number

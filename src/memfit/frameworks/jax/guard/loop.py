"""A training step of JAX that survives running out of memory, as a guard drives it.

JAX deletes donated arrays even where the program that they were given to never ran. So the step is two programs: the
first computes loss and gradients, which is where memory runs out, and donates nothing: it can be run again on the same
batch, in more parts. The second updates in place and asks for next to nothing; where its compiled form says otherwise,
it doesn't donate either. Memory for what isn't made in place is asked for before it is run, see `memory_request`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from memfit.core.adapter import GuardedLoop
from memfit.core.guarding import NEVER, BatchSize, BrokenUpdate, CannotFit, Fallbacks, MemoryFailure
from memfit.core.oom import caught
from memfit.core.settings import Settings
from memfit.frameworks.jax.apply.training import TrainStep, check_batch, join_params, split_params
from memfit.frameworks.jax.guard.memory_request import MemoryRequest, beside_arguments, form_of

# What an update in place may ask for and still be trusted not to fail.
_NEXT_TO_NOTHING = 1 << 20


class JaxLoop(GuardedLoop):
    """Steps of a loss and an optimizer, as for `train_step`, each run again in more parts where memory runs out."""

    model_name = "loss function"

    def __init__(self, loss: Callable[[Any, Any], Any], optimizer: Any, *, settings: Settings) -> None:
        self._loss = loss
        self._optimizer = self.owner = optimizer
        self._settings = settings
        self._programs: dict[int, tuple[Any, MemoryRequest]] = {}
        self._updates: dict[Any, Any] = {}
        self._params = self._state = self.batch = None
        # Refuses what can't be run before the first batch.
        self._plain = TrainStep(loss, optimizer, settings)
        self.init = self._plain.init
        """The optimizer's state for parameters."""
        self.result: Any = None
        """Parameters, state and loss after the last step."""

    def take(self, params: Any, state: Any, batch: Any) -> None:
        """The next step has these arguments; it uses parameters and state up, as a donating one does."""
        self._params, self._state, self.batch = params, state, batch

    def attempt(self, settings_of: Callable[[Any], Settings], *, again: bool) -> MemoryFailure | None:
        """Gradients of the batch in as many parts as the settings say, and the update."""
        params, state, batch = self._params, self._state, self.batch
        self.happened, self.num_halvings = None, 1
        trained, fixed, structure = split_params(params)
        size = check_batch(batch)
        part = 1 if size is None else min(size, settings_of(batch).part_size(size))
        computed: list[Any] = []

        def compute() -> None:
            program, request = self._program(part)
            request.ask((structure, trained, fixed, batch))
            # Errors of the run itself come late: not before the results are waited for.
            computed[:] = jax.block_until_ready(program(structure, trained, fixed, batch))

        failure = caught(compute)
        if failure is not None:
            self.num_halvings = _num_halvings(failure)
            return failure
        value, gradients = computed
        trained, state = self._updated(trained, state, gradients)
        self.result = join_params(trained, fixed, structure), state, value
        self.happened = True
        return None

    def roll_back(self) -> None:
        """Nothing has changed: gradients are values."""

    def _program(self, part: int) -> tuple[Any, MemoryRequest]:
        if part not in self._programs:
            step = TrainStep(self._loss, self._optimizer, replace(self._settings, micro_batch_size=part))
            program = jax.jit(step.gradients, static_argnums=0)
            self._programs[part] = program, MemoryRequest(program)
        return self._programs[part]

    def _updated(self, trained: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        key = form_of((trained, state))
        if key not in self._updates:
            update: Any = jax.jit(self._plain.update, donate_argnums=(0, 1)).lower(trained, state, gradients).compile()
            memory = update.memory_analysis()
            request = None
            if memory is None or beside_arguments(memory) > _NEXT_TO_NOTHING:
                # An update that leaves the old values where they are.
                update = jax.jit(self._plain.update)
                request = MemoryRequest(update)
            self._updates[key] = update, request
        update, request = self._updates[key]
        updated: list[Any] = []

        def run() -> None:
            if request is not None:
                request.ask((trained, state, gradients))
            updated[:] = jax.block_until_ready(update(trained, state, gradients))

        failure = caught(run)
        if failure is None:
            return updated[0], updated[1]
        if any(leaf.is_deleted() for leaf in jax.tree.leaves((trained, state)) if isinstance(leaf, jax.Array)):
            raise BrokenUpdate(
                f"memory ran out in the update: {failure.text} JAX has deleted the parameters; go on from a checkpoint."
            )
        raise CannotFit(
            f"memory ran out in the update: {failure.text} Parameters and state are as they were before the step; the "
            "optimizer's own memory doesn't fit beside them."
        )

    # What the guard asks.

    def size_of(self, batch: Any) -> BatchSize:
        """Samples of a batch."""
        return BatchSize(check_batch(batch))

    def fallbacks(self) -> Fallbacks:
        """Smaller parts alone, for good: what was found once holds for the batches to come."""
        return Fallbacks(grow_after=NEVER)

    def explain(self, failure: MemoryFailure, settings: Settings, why_whole: str) -> str:
        """The message for a step that can't fit: what ran out, and what to do."""
        return (
            f"memory ran out with a single sample at a time: {failure.text} Parameters and state are as they were "
            "before the step. Mark blocks with memfit.jax.block and plan with recomputation, or use a smaller model."
        )

    def close(self) -> None:
        """Nothing was changed."""


def _num_halvings(failure: MemoryFailure) -> int:
    """How often a batch has to be halved at least: what doesn't depend on its size only makes it more."""
    number = 1
    if failure.requested_bytes is not None and failure.free_bytes is not None:
        while failure.requested_bytes >> number > max(failure.free_bytes, 1):
            number += 1
    return number

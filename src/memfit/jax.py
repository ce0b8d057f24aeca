"""Training steps of JAX that fit: `memfit.jax.train_step`, `memfit.jax.block`.

    step = memfit.jax.train_step(loss, optax.adam(1e-3), plan=plan)
    state = step.init(params)
    for batch in batches:
        params, state, value = step(params, state, batch)

JAX is loaded when one of them is used.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from memfit.core.errors import BadInput, MissingDependency, how_to_install
from memfit.core.plan import Plan
from memfit.core.settings import Settings

__all__ = ["block", "train_step"]


def train_step(
    loss: Callable[[Any, Any], Any],
    optimizer: Any,
    *,
    plan: Plan | None = None,
    micro_batches: int = 1,
    recompute: tuple[str, ...] = (),
    guard: bool = False,
) -> Any:
    """A jitted training step, `step(params, state, batch) -> (params, state, loss)`; `step.init(params)` is its state.

    Args:
        loss: takes (params, batch), returns the scalar mean over the batch, or (loss, weight), where the weight is the
            mean's true denominator, such as the number of tokens.
        optimizer: of optax.
        plan: how to run it, from `memfit.plan`; excludes the two below.
        micro_batches: parts of each batch, computed one after the other; the update is that of the whole batch.
        recompute: names of calls of marked blocks ("layer.0") that are computed again in the backward pass.
        guard: a step that runs out of memory is run again on the same batch, in more parts.
    """
    if find_spec("jax") is None:
        raise MissingDependency(f"JAX is not installed. Install it with {how_to_install('jax')}.")
    if plan is not None and (micro_batches != 1 or recompute):
        raise BadInput("a plan says how many micro-batches there are and what is recomputed; give it alone.")
    if plan is not None and plan.framework != "jax":
        raise BadInput(f"the plan is one for {plan.framework}. Make it from the loss function: memfit.plan(loss, ...).")
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise BadInput(f"micro_batches must be a whole number from 1 up, but {micro_batches!r} was given.")
    from memfit.api.guarded_step import GuardedStep
    from memfit.frameworks.jax.apply.training import TrainStep

    settings = Settings(micro_batches=micro_batches, checkpoint=tuple(recompute), donate=True)
    settings = settings if plan is None else plan.settings
    if guard:
        return GuardedStep(loss, optimizer, settings)
    return TrainStep(loss, optimizer, settings)


def block(function: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
    """Marks a part of a loss function that a plan may have computed again in the backward pass.

    Args:
        function: of arrays, or a module that can be called; each call of it is a block of its own.
        name: in plans and reports; the function's own by default.
    """
    if find_spec("jax") is None:
        raise MissingDependency(f"JAX is not installed. Install it with {how_to_install('jax')}.")
    from memfit.frameworks.jax.apply import marked

    return marked.block(function, name)

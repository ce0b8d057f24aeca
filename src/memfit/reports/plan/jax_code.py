"""A plan as plain JAX: the training step that does the same without memfit."""

from memfit.core.plan import Plan
from memfit.core.units import format_size
from memfit.reports.estimate import figures

_WHOLE = """\
def gradients(params, batch):
    return jax.value_and_grad(loss)(params, batch)"""

_IN_PARTS = '''\
def gradients(params, batch):
    """Sums over parts of PART samples, then over what is left; the loss is a mean over samples."""
    size = jax.tree.leaves(batch)[0].shape[0]

    def add(total, start, length):
        part = jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, start, length), batch)
        new = jax.value_and_grad(loss)(params, part)
        return jax.tree.map(lambda a, b: a + b * (length / size), total, new)

    shapes = jax.eval_shape(jax.value_and_grad(loss), params, batch)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    starts = jnp.arange(size // PART) * PART
    total, _ = jax.lax.scan(lambda total, start: (add(total, start, PART), None), zeros, starts)
    return add(total, size - size % PART, size % PART) if size % PART else total'''

_NARROW = '''\
def loss(params, batch):
    """The loss in bfloat16, of parameters that stay in float32."""
    narrow = lambda leaf: leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf
    params, batch = jax.tree.map(narrow, (params, batch))
    return own_loss(params, batch).astype(jnp.float32)'''


def format_jax_code(plan: Plan) -> str:
    """The program, with a trailing newline."""
    settings = plan.settings
    where = f"within {format_size(plan.budget_bytes)} on {figures.device_title(plan.device)}"
    head = [f"# How to run {figures.printable(plan.subject)} {where} in plain JAX; loss and optimizer are yours."]
    if settings.checkpoint:
        names = ", ".join(figures.printable(name) for name in settings.checkpoint)
        head += [
            f"# Computed again in the backward pass: {names}. Put jax.checkpoint around these calls in the loss.",
            "# XLA for CPU merges the second computation with the first and saves nothing; memfit keeps them apart.",
        ]
    split = settings.micro_batches > 1
    imports = ["import jax", *(["import jax.numpy as jnp"] if split or settings.precision else []), "import optax"]
    blocks = ["\n".join([*head, *imports])]
    if settings.precision:
        blocks.append(_NARROW)
    if split:
        size = settings.micro_batch_size or -(-(plan.batch_size or 1) // settings.micro_batches)
        blocks.append(f"PART = {size}  # samples that are computed at a time")
    blocks.append(_IN_PARTS if split else _WHOLE)
    donated = "\n@partial(jax.jit, donate_argnums=(0, 1))" if settings.donate else "\n@jax.jit"
    blocks.append(
        donated.strip()
        + """
def step(params, state, batch):
    value, found = gradients(params, batch)
    changes, state = optimizer.update(found, state, params)
    return optax.apply_updates(params, changes), state, value"""
    )
    if settings.donate:
        blocks[0] = blocks[0].replace("\nimport jax", "\nfrom functools import partial\n\nimport jax", 1)
    return "\n\n\n".join(blocks) + "\n"

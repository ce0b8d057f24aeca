"""`memfit.estimate`: the peak memory of a training step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from memfit.api.devices import resolve
from memfit.api.jobs import as_job, open_estimator
from memfit.core.device import Device
from memfit.core.estimate import LACKS_PRECISION, Estimate, Note
from memfit.core.progress import doing
from memfit.core.replay import AllocatorOptions
from memfit.core.units import format_size
from memfit.estimator.estimator import checked_batch_size

# What a device without bfloat16 does instead.
_IN_FLOAT16 = {"amp-bf16": "amp-fp16", "bf16": "fp16"}


def estimate(
    model: Any,
    *arguments: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    batch: Any = None,
    optimizer: Any = None,
    device: str | Device | None = None,
    precision: str | None = None,
    mode: str | None = None,
    allocator: AllocatorOptions | None = None,
    batch_size: int | None = None,
) -> Estimate:
    """Peak memory of a training step on a device that need not be there.

    Args:
        model: an `nn.Module`, a callable that builds one (built without memory for its weights), a compiled
            `keras.Model`, a training step of JAX, or a `Job`.
        arguments: loss and batch by their place; what a step of JAX takes, arrays or shapes.
        loss: takes the model and a batch and returns the scalar loss; or a criterion such as `nn.CrossEntropyLoss()`,
            for a batch (x, y). None where the model returns its loss, and for Keras, which has it from `compile`.
        batch: any nesting of tensors, meta tensors included; (x, y) for Keras.
        optimizer: an instance, a callable that takes parameters, a name such as "adamw", or None.
        device: a name of the catalogue ("rtx-3090"), "cpu", a size ("24GiB"); None means this machine's own GPU.
        precision: "fp32", "fp16", "bf16", "amp-fp16", "amp-bf16", or None to leave the model as it is.
        mode: "training" (the default), or "inference" for a forward pass without gradients.
        allocator: settings of PyTorch's caching allocator.
        batch_size: replaces the first dimension of the batch.

    Returns:
        The peak, where it goes, and whether it fits.
    """
    job = as_job(model, arguments, loss, batch, optimizer=optimizer, precision=precision, mode=mode)
    size = None if batch_size is None else checked_batch_size(batch_size)
    target, options = resolve(device), allocator or AllocatorOptions()
    with doing("estimating"):
        result = open_estimator(job, target, options, size).run()
        other = _IN_FLOAT16.get(job.precision or "")
        if other is None or not any(note.code == LACKS_PRECISION for note in result.notes):
            return result
        needed = format_size(open_estimator(replace(job, precision=other), target, options, size).run().peak_bytes)
    remark = f"with precision {other} the step needs {needed} (simulated), with {job.precision} "
    return replace(result, notes=(*result.notes, Note(LACKS_PRECISION, remark + format_size(result.peak_bytes))))

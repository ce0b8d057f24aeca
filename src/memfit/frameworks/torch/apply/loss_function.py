"""The loss of a step as a function of (model, batch), from the ways in which people have it.

- A function of (model, batch) is taken as it is.
- A criterion (`nn.CrossEntropyLoss()`, `F.mse_loss`, a function whose second argument is called `target`) compares
  outputs with targets: of a batch (x, y) the last part is the target, of a mapping the labels.
- None: the model returns its loss itself, alone, as the one scalar of a tuple, or as `.loss`, as models of transformers
  do where the batch holds labels. A pass without gradients needs none: whatever the model returns is kept.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memfit.core.errors import BadBatch, BadInput, BadLoss

LossFunction = Callable[[Any, Any], Any]

_TARGETS = ("labels", "label", "targets", "target", "y", "y_true", "tgt", "truth", "gt")
_MODELS = ("model", "net", "network", "module", "m")
_EXPECTED = (
    "Give a function of (model, batch) that returns the scalar loss; a criterion such as nn.CrossEntropyLoss() with a "
    "batch (x, y); or none for a model that returns its loss, as `.loss` or as a scalar"
)


def as_loss(loss: Any) -> LossFunction:
    """`loss` as a function of (model, batch)."""
    if loss is None:
        return own_loss
    if not callable(loss):
        raise BadInput(f"loss must be a function of (model, batch), but {type(loss).__name__} was given. {_EXPECTED}.")
    if isinstance(loss, type) and issubclass(loss, torch.nn.Module):
        raise BadInput(f"loss is the class {loss.__name__}; give an object of it: {loss.__name__}().")
    if _is_criterion(loss):
        return functools.partial(_compared, loss)
    made: LossFunction = loss
    return made


def own_loss(model: Any, batch: Any) -> Any:
    """The loss that the model returns itself."""
    if isinstance(model, torch.nn.Module) and isinstance(batch, tuple | list):
        try:
            inspect.signature(model.forward).bind(*batch)
        except TypeError as error:
            name = type(model).__name__
            raise BadLoss(
                f"no loss was given, and {name} does not take the {len(batch)} parts of the batch ({error}). "
                f"{_EXPECTED}."
            ) from None
    output = _called(model, batch)
    if not torch.is_grad_enabled():
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple | list) and output:
        scalars = [part for part in output if isinstance(part, torch.Tensor) and part.ndim == 0]
        loss = scalars[0] if len(scalars) == 1 else output[0]
    if loss is None and isinstance(output, torch.Tensor):
        loss = output
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(output).__name__
        is_mapping = isinstance(batch, Mapping)
        has_target = any(name in batch for name in _TARGETS) if is_mapping else isinstance(batch, tuple | list)
        labels = "" if has_target else " The batch holds no labels, without which it may have none."
        raise BadLoss(f"no loss was given and {type(model).__name__} returns none, but {got}.{labels} {_EXPECTED}.")
    return loss


def _compared(criterion: Any, model: Any, batch: Any) -> Any:
    """What a criterion says of the model's output and the target of the batch."""
    if isinstance(batch, Mapping):
        name = next((name for name in _TARGETS if name in batch), None)
        inputs: Any = {key: value for key, value in batch.items() if key != name}
        target = None if name is None else batch[name]
    elif isinstance(batch, tuple | list) and len(batch) > 1:
        *rest, target = batch
        inputs = rest[0] if len(rest) == 1 else tuple(rest)
    else:
        inputs, target = None, None
    if inputs is None or target is None:
        name = getattr(criterion, "__name__", type(criterion).__name__)
        raise BadBatch(
            f"the loss {name} compares outputs with targets, but the batch ({type(batch).__name__}) has no "
            f"target. Give a batch (x, y) or a mapping with one of {', '.join(_TARGETS[:4])}. {_EXPECTED}."
        )
    output = _called(model, inputs)
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return _beside(criterion, target)(output if logits is None else logits, target)


def _beside(criterion: Any, target: Any) -> Any:
    """A criterion whose buffers, such as weights of classes, are where the targets are."""
    if not isinstance(criterion, torch.nn.Module) or not isinstance(target, torch.Tensor):
        return criterion
    moved = {name: one.to(target.device) for name, one in criterion.named_buffers() if one.device != target.device}
    return (lambda *given: torch.func.functional_call(criterion, moved, given)) if moved else criterion


def _called(model: Any, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _is_criterion(loss: Any) -> bool:
    """Whether `loss` takes an output and a target, and not a model and a batch."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    if isinstance(loss, torch.nn.Module):
        if type(loss).__module__.startswith("torch.nn."):
            return True
        loss = loss.forward
    elif getattr(loss, "__module__", None) in ("torch.nn.functional", "torch._C._nn"):
        return True
    try:
        names = list(inspect.signature(loss).parameters)
    except (TypeError, ValueError):
        return False
    return len(names) > 1 and names[1].lower() in _TARGETS and names[0].lower() not in _MODELS

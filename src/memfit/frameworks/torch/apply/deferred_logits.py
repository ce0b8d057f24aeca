"""Logits that aren't computed until somebody needs them whole.

With a large vocabulary the logits of a batch, [tokens, vocabulary], are its largest tensor, and most code only hands
them to a cross entropy, after a cast, a shift by one position and a change of shape. `DeferredLogits` replaces them:
a tensor without memory of its own that knows the last hidden states, the weight, and what has been asked for since.
Selections and new shapes concern rows, and are done to the hidden states; casts and factors concern elements, and are
noted. Whatever else is asked for gets the true logits, which are then computed once.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from memfit.core.errors import BadInput
from memfit.frameworks.torch import internals

_Arguments = tuple[Any, ...]
_Options = dict[str, Any]
Steps = tuple[tuple[Callable[..., Any], _Arguments, _Options], ...]
_DTYPES = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}


class AutocastState(NamedTuple):
    """AutocastState as it was when something was called, to be the same when it is computed later."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device_type: str) -> "AutocastState":
        """The state for a type of device."""
        return cls(device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    def again(self) -> AbstractContextManager[Any]:
        """This state, for as long as it lasts."""
        if AutocastState.now(self.device_type) == self:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled)

    def result_of(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a matrix product of tensors of `dtype`."""
        casts = self.enabled and dtype.is_floating_point and dtype != torch.float64
        return self.dtype if casts else dtype


def finished(logits: torch.Tensor, steps: Steps) -> torch.Tensor:
    """`logits` after `steps`."""
    for function, arguments, options in steps:
        logits = function(logits, *arguments, **options)
    return logits


@dataclass(frozen=True, slots=True)
class Recipe:
    """How logits are computed.

    Args:
        hidden: [..., features]; every row makes one row of logits.
        weight: [vocabulary, features].
        bias: [vocabulary], or None.
        autocast: when the linear layer was called.
        steps: what follows the linear layer, element by element or row by row: (function, further arguments, options).
        classes_second: the vocabulary is dimension 1 of three rather than the last.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    autocast: AutocastState
    steps: Steps = ()
    classes_second: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of the linear layer's own output."""
        return self.autocast.result_of(self.hidden.dtype)

    def computed(self) -> torch.Tensor:
        """The logits."""
        with self.autocast.again():
            logits = finished(torch.nn.functional.linear(self.hidden, self.weight, self.bias), self.steps)
        return logits.transpose(1, 2) if self.classes_second else logits


class DeferredLogits(torch.Tensor):
    """A tensor in place of logits; made by `deferred`."""

    recipe: Recipe
    _real: torch.Tensor | None
    _versions: tuple[int, ...]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: _Arguments = (), kwargs: _Options | None = None) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None and args and isinstance(args[0], DeferredLogits) and args[0]._real is None:
            result = rule(func, args[0], args[1:], kwargs)
            if result is not NotImplemented:
                return result
        return func(*internals.tree_map(real, args), **internals.tree_map(real, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: _Arguments = (), kwargs: _Options | None = None
    ) -> Any:
        return func(*internals.tree_map(real, args), **internals.tree_map(real, kwargs or {}))


def deferred(recipe: Recipe, dtype: torch.dtype | None = None) -> DeferredLogits:
    """Logits to be computed by `recipe` when they are needed, of the linear layer's dtype if no other is given."""
    hidden, weight, bias = recipe.hidden, recipe.weight, recipe.bias
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    with internals.disable_torch_function():
        shape = [*hidden.shape[:-1], weight.shape[0]]
        if recipe.classes_second:
            shape = [shape[0], shape[2], shape[1]]
        logits: DeferredLogits = getattr(*internals.place("make_wrapper_subclass"))(
            DeferredLogits, shape, dtype=dtype or recipe.dtype, device=hidden.device, requires_grad=grad
        )
        logits.recipe = recipe
        logits._real = None
        logits._versions = _versions(recipe)
    return logits


def real(value: Any) -> Any:
    """`value`, or the true logits where it stands for logits."""
    if not isinstance(value, DeferredLogits):
        return value
    if value._real is None:
        if value._versions != _versions(value.recipe):
            raise BadInput(
                "logits were read after the weights that make them had changed. With chunked cross entropy, logits are "
                "computed when they are read: read them inside the loss function, or plan without that move."
            )
        with torch.set_grad_enabled(_metadata("requires_grad", value)):
            value._real = value.recipe.computed()
    return value._real


def _versions(recipe: Recipe) -> tuple[int, ...]:
    """Changes whenever a tensor of the recipe is written to."""
    return tuple(internals.version_of(t) for t in (recipe.hidden, recipe.weight, recipe.bias) if t is not None)


def _metadata(name: str, logits: DeferredLogits) -> Any:
    with internals.disable_torch_function():
        return getattr(logits, name)


def _again(logits: DeferredLogits, dtype: torch.dtype | None = None, step: Any = None, **changes: Any) -> Any:
    """Logits of the changed recipe, with one more step at its end."""
    steps = logits.recipe.steps if step is None else (*logits.recipe.steps, step)
    return deferred(replace(logits.recipe, steps=steps, **changes), dtype or _metadata("dtype", logits))


# Rules: each takes (func, logits, arguments, options) and returns the result, or NotImplemented for true logits.


def _of_hidden(func: Any, logits: DeferredLogits, args: _Arguments, kwargs: _Options) -> Any:
    return func(logits.recipe.hidden, *args, **kwargs)


def _of_itself(func: Any, logits: DeferredLogits, args: _Arguments, kwargs: _Options) -> Any:
    with internals.disable_torch_function():
        return func(logits, *args, **kwargs)


def _to(func: Any, logits: DeferredLogits, args: _Arguments, kwargs: _Options) -> Any:
    """`.float()`, `.to(dtype)`, `.to(device)` where that changes nothing, and both."""
    here, before = logits.recipe.hidden.device, _metadata("dtype", logits)
    dtype = _DTYPES.get(func.__name__, before)
    for value in (*args, *(kwargs[name] for name in ("device", "dtype", "other") if name in kwargs)):
        if isinstance(value, torch.Tensor):
            if value.device != here:
                return NotImplemented
            dtype = value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, str | torch.device):
            if torch.device(value) not in (here, torch.device(here.type)):
                return NotImplemented
        elif value not in (None, True, False):
            return NotImplemented
    return logits if dtype == before else _again(logits, dtype, step=(torch.Tensor.to, (dtype,), {}))


def _by_number(func: Any, logits: DeferredLogits, args: _Arguments, kwargs: _Options) -> Any:
    """`logits / 30.0`, `torch.tanh(logits)`: the same for each element."""
    if kwargs or not all(isinstance(value, int | float) for value in args):
        return NotImplemented
    return _again(logits, step=(func, args, {}))


def _log_softmax(func: Any, logits: DeferredLogits, args: _Arguments, kwargs: _Options) -> Any:
    dimension = args[0] if args else kwargs.get("dim")
    if logits.recipe.classes_second or dimension not in (-1, _metadata("ndim", logits) - 1):
        return NotImplemented
    dtype = kwargs.get("dtype")
    options: _Options = {"dim": -1} if dtype is None else {"dim": -1, "dtype": dtype}
    return _again(logits, dtype, step=(torch.log_softmax, (), options))


def _reshape(func: Any, logits: DeferredLogits, args: _Arguments, kwargs: _Options) -> Any:
    """New shapes that leave the vocabulary where it is."""
    sizes: Any = kwargs.get("shape", kwargs.get("size", args))
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        sizes = sizes[0]
    if logits.recipe.classes_second or isinstance(sizes, torch.dtype) or not sizes:
        return NotImplemented
    *rows, vocabulary = sizes
    hidden = logits.recipe.hidden
    if vocabulary == -1:
        vocabulary = _metadata("shape", logits).numel() // max(math.prod(rows), 1)
    if vocabulary != logits.recipe.weight.shape[0] or not rows:
        return NotImplemented
    return _again(logits, hidden=hidden.reshape(*rows, hidden.shape[-1]))


def _flatten(func: Any, logits: DeferredLogits, args: _Arguments, kwargs: _Options) -> Any:
    given = {"start_dim": 0, "end_dim": -1} | dict(zip(("start_dim", "end_dim"), args, strict=False)) | kwargs
    rank = _metadata("ndim", logits)
    if logits.recipe.classes_second or given["end_dim"] % rank >= rank - 1:
        return NotImplemented
    return _again(logits, hidden=logits.recipe.hidden.flatten(given["start_dim"], given["end_dim"]))


def _select(func: Any, logits: DeferredLogits, args: _Arguments, kwargs: _Options) -> Any:
    """`logits[..., :-1, :]`, `logits[mask]`: rows, but no part of the vocabulary."""
    (index,) = args
    rank = _metadata("ndim", logits)
    parts = index if isinstance(index, tuple) else (index,)
    if len(parts) == 1 and isinstance(parts[0], torch.Tensor):
        mask = parts[0]
        of_rows = not isinstance(mask, DeferredLogits) and (mask.dtype != torch.bool or mask.ndim < rank)
    elif not all(part is Ellipsis or isinstance(part, int | slice) for part in parts):
        of_rows = False
    elif parts[-1] is Ellipsis:
        of_rows = len(parts) - 1 < rank
    elif Ellipsis in parts or len(parts) == rank:
        of_rows = bool(parts[-1] == slice(None))
    else:
        of_rows = len(parts) < rank
    if logits.recipe.classes_second or not of_rows:
        return NotImplemented
    return _again(logits, hidden=logits.recipe.hidden[index])


def _transpose(func: Any, logits: DeferredLogits, args: _Arguments, kwargs: _Options) -> Any:
    """[batch, positions, vocabulary] as [batch, vocabulary, positions], as `cross_entropy` wants more than rows."""
    dimensions = args[0] if len(args) == 1 else args
    if kwargs or _metadata("ndim", logits) != 3:
        return NotImplemented
    if tuple(dimension % 3 for dimension in dimensions) not in ((1, 2), (2, 1), (0, 2, 1)):
        return NotImplemented
    return _again(logits, classes_second=not logits.recipe.classes_second)


def _detach(func: Any, logits: DeferredLogits, args: _Arguments, kwargs: _Options) -> Any:
    hidden, weight, bias = logits.recipe.hidden, logits.recipe.weight, logits.recipe.bias
    return _again(logits, hidden=hidden.detach(), weight=weight.detach(), bias=None if bias is None else bias.detach())


def _register_hook(func: Any, logits: DeferredLogits, args: _Arguments, kwargs: _Options) -> Any:
    """Sharding asks to be called when the backward pass arrives at a module's output, whatever the gradient is."""
    if not str(getattr(args[0], "__module__", "")).startswith("torch.distributed.fsdp"):
        return NotImplemented
    return func(logits.recipe.hidden, *args, **kwargs)


_PROPERTIES = "shape dtype ndim requires_grad layout is_sparse is_nested is_quantized _base"
_METHODS = "size dim numel is_floating_point is_complex element_size __len__ is_inference"


def _rules() -> dict[Any, Callable[[Any, DeferredLogits, _Arguments, _Options], Any]]:
    tensor: Any = torch.Tensor
    functional: Any = torch.nn.functional
    by_names = {
        _to: " ".join(("to", *_DTYPES)),
        _by_number: "tanh mul div true_divide __mul__ __rmul__ __truediv__",
        _log_softmax: "log_softmax",
        _reshape: "view reshape",
        _flatten: "flatten",
        _transpose: "transpose permute swapaxes swapdims",
        _detach: "detach",
        _select: "__getitem__",
        _register_hook: "register_hook",
        _of_itself: _METHODS,
        _of_hidden: "get_device",
    }
    known: dict[Any, Callable[[Any, DeferredLogits, _Arguments, _Options], Any]] = {
        tensor.contiguous: lambda func, logits, args, kwargs: logits
    }
    for rule, names in by_names.items():
        for name in names.split():
            known[getattr(tensor, name)] = rule
            # The same function of `torch` itself, and not what has its name there by chance.
            if not name.startswith("__") and name not in ("to", "view", "size", *_DTYPES) and hasattr(torch, name):
                known[getattr(torch, name)] = rule
    known |= {getattr(tensor, name).__get__: _of_itself for name in _PROPERTIES.split()}
    known |= {getattr(tensor, name).__get__: _of_hidden for name in ("device", "is_cuda", "is_cpu", "is_meta")}
    return known | {functional.log_softmax: _log_softmax}


_RULES = _rules()

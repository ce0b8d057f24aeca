"""Logits that aren't computed until somebody needs them whole.

With a large vocabulary the logits of a batch, [tokens, vocabulary], are its largest tensor, and most code only hands
them to a cross entropy, after a cast, a shift by one position and a change of shape. `DeferredLogits` replaces them:
a tensor without memory of its own that knows the last hidden states, the weight, and what has been asked for since.
Selections and new shapes concern rows, and are done to the hidden states; casts and factors concern elements, and are
noted. Whatever else is asked for gets the true logits, which are then computed once.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from memfit.core.errors import BadInput

_Arguments = tuple[Any, ...]
_Options = dict[str, Any]
Steps = tuple[tuple[Callable[..., Any], _Arguments, _Options], ...]
_DTYPES = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}


class Autocast(NamedTuple):
    """Autocast as it was when something was called, to be the same when it is computed later."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device_type: str) -> "Autocast":
        """The state for a type of device."""
        return cls(device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    def again(self) -> AbstractContextManager[Any]:
        """This state, for as long as it lasts."""
        if Autocast.now(self.device_type) == self:
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
    autocast: Autocast
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
            result = rule(func, args, kwargs)
            if result is not NotImplemented:
                return result
        return func(*tree_map(real, args), **tree_map(real, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: _Arguments = (), kwargs: _Options | None = None
    ) -> Any:
        return func(*tree_map(real, args), **tree_map(real, kwargs or {}))


def deferred(recipe: Recipe, dtype: torch.dtype | None = None) -> DeferredLogits:
    """Logits to be computed by `recipe` when they are needed.

    Args:
        recipe: how.
        dtype: of the logits; None for that of the linear layer.
    """
    hidden, weight, bias = recipe.hidden, recipe.weight, recipe.bias
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    with torch._C.DisableTorchFunction():
        shape = [*hidden.shape[:-1], weight.shape[0]]
        if recipe.classes_second:
            shape = [shape[0], shape[2], shape[1]]
        logits = torch.Tensor._make_wrapper_subclass(
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
    tensors = (recipe.hidden, recipe.weight, recipe.bias)
    return tuple(t._version for t in tensors if t is not None and not t.is_inference())


def _metadata(name: str, logits: DeferredLogits) -> Any:
    with torch._C.DisableTorchFunction():
        return getattr(logits, name)


def _again(logits: DeferredLogits, dtype: torch.dtype | None = None, **changes: Any) -> DeferredLogits:
    dtype = dtype or _metadata("dtype", logits)
    return deferred(replace(logits.recipe, **changes), dtype)


def _of_hidden(func: Any, args: _Arguments, kwargs: _Options) -> Any:
    return func(args[0].recipe.hidden, *args[1:], **kwargs)


def _of_itself(func: Any, args: _Arguments, kwargs: _Options) -> Any:
    with torch._C.DisableTorchFunction():
        return func(*args, **kwargs)


def _same(func: Any, args: _Arguments, kwargs: _Options) -> Any:
    return args[0]


def _cast(func: Any, args: _Arguments, kwargs: _Options) -> Any:
    logits = args[0]
    dtype = _DTYPES[func.__name__]
    if dtype == _metadata("dtype", logits):
        return logits
    return _again(logits, dtype, steps=(*logits.recipe.steps, (torch.Tensor.to, (dtype,), {})))


def _to(func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """`.to(dtype)`, `.to(device)` where that changes nothing, and both."""
    logits, here = args[0], args[0].recipe.hidden.device
    dtype = _metadata("dtype", logits)
    named = {name: value for name, value in kwargs.items() if name in ("device", "dtype", "other")}
    for value in (*args[1:], *named.values()):
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
    if dtype == _metadata("dtype", logits):
        return logits
    return _again(logits, dtype, steps=(*logits.recipe.steps, (torch.Tensor.to, (dtype,), {})))


def _by_number(func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """`logits / 30.0`, `torch.tanh(logits)`: the same for each element."""
    if kwargs or not all(isinstance(value, int | float) for value in args[1:]):
        return NotImplemented
    return _again(args[0], steps=(*args[0].recipe.steps, (func, args[1:], {})))


def _log_softmax(func: Any, args: _Arguments, kwargs: _Options) -> Any:
    logits = args[0]
    dimension = args[1] if len(args) > 1 else kwargs.get("dim")
    if logits.recipe.classes_second or dimension not in (-1, _metadata("ndim", logits) - 1):
        return NotImplemented
    dtype = kwargs.get("dtype")
    options: _Options = {"dim": -1} if dtype is None else {"dim": -1, "dtype": dtype}
    return _again(logits, dtype, steps=(*logits.recipe.steps, (torch.log_softmax, (), options)))


def _reshape(func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """New shapes that leave the vocabulary where it is."""
    logits = args[0]
    sizes: Any = kwargs.get("shape", kwargs.get("size", args[1:]))
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        sizes = sizes[0]
    if logits.recipe.classes_second or isinstance(sizes, torch.dtype) or not sizes:
        return NotImplemented
    *rows, vocabulary = sizes
    hidden = logits.recipe.hidden
    if vocabulary == -1:
        num_rows = 1
        for size in rows:
            num_rows *= size
        vocabulary = _metadata("shape", logits).numel() // max(num_rows, 1)
    if vocabulary != logits.recipe.weight.shape[0] or not rows:
        return NotImplemented
    return _again(logits, hidden=hidden.reshape(*rows, hidden.shape[-1]))


def _flatten(func: Any, args: _Arguments, kwargs: _Options) -> Any:
    logits = args[0]
    given = dict(zip(("start_dim", "end_dim"), args[1:], strict=False)) | kwargs
    first, last = given.get("start_dim", 0), given.get("end_dim", -1)
    rank = _metadata("ndim", logits)
    if logits.recipe.classes_second or last % rank >= rank - 1:
        return NotImplemented
    return _again(logits, hidden=logits.recipe.hidden.flatten(first, last))


def _select(func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """`logits[..., :-1, :]`, `logits[mask]`: rows, but no part of the vocabulary."""
    logits, index = args
    rank = _metadata("ndim", logits)
    parts = index if isinstance(index, tuple) else (index,)
    if logits.recipe.classes_second or not _selects_rows(parts, rank):
        return NotImplemented
    return _again(logits, hidden=logits.recipe.hidden[index])


def _selects_rows(parts: tuple[Any, ...], rank: int) -> bool:
    everything = slice(None)
    if len(parts) == 1 and isinstance(parts[0], torch.Tensor):
        mask = parts[0]
        return not isinstance(mask, DeferredLogits) and (mask.dtype != torch.bool or mask.ndim < rank)
    if not all(part is Ellipsis or isinstance(part, int | slice) for part in parts):
        return False
    if parts[-1] is Ellipsis:
        return len(parts) - 1 < rank
    if Ellipsis in parts or len(parts) == rank:
        return bool(parts[-1] == everything)
    return len(parts) < rank


def _transpose(func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """[batch, positions, vocabulary] as [batch, vocabulary, positions], as `cross_entropy` wants more than rows."""
    logits = args[0]
    dimensions = args[1] if len(args) == 2 else args[1:]
    if kwargs or _metadata("ndim", logits) != 3:
        return NotImplemented
    given = tuple(dimension % 3 for dimension in dimensions)
    if given not in ((1, 2), (2, 1), (0, 2, 1)):
        return NotImplemented
    return _again(logits, classes_second=not logits.recipe.classes_second)


def _detach(func: Any, args: _Arguments, kwargs: _Options) -> Any:
    logits, recipe = args[0], args[0].recipe
    bias = None if recipe.bias is None else recipe.bias.detach()
    return _again(logits, hidden=recipe.hidden.detach(), weight=recipe.weight.detach(), bias=bias)


def _register_hook(func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """Sharding asks to be called when the backward pass arrives at a module's output, whatever the gradient is."""
    if not str(getattr(args[1], "__module__", "")).startswith("torch.distributed.fsdp"):
        return NotImplemented
    return func(args[0].recipe.hidden, *args[1:], **kwargs)


def _rules() -> dict[Any, Callable[[Any, _Arguments, _Options], Any]]:
    tensor: Any = torch.Tensor
    known: dict[Any, Callable[[Any, _Arguments, _Options], Any]] = {}
    for name in (
        "shape",
        "dtype",
        "ndim",
        "requires_grad",
        "layout",
        "is_sparse",
        "is_nested",
        "is_quantized",
        "_base",
    ):
        known[getattr(tensor, name).__get__] = _of_itself
    for name in ("size", "dim", "numel", "is_floating_point", "is_complex", "element_size", "__len__", "is_inference"):
        known[getattr(tensor, name)] = _of_itself
    for name in ("device", "is_cuda", "is_cpu", "is_meta"):
        known[getattr(tensor, name).__get__] = _of_hidden
    known |= {torch.numel: _of_itself, torch.is_floating_point: _of_itself, tensor.get_device: _of_hidden}
    known |= {getattr(tensor, name): _cast for name in _DTYPES}
    known |= {function: _by_number for function in (torch.tanh, tensor.tanh, torch.mul, torch.div, torch.true_divide)}
    for name in ("mul", "div", "true_divide", "__mul__", "__rmul__", "__truediv__"):
        known[getattr(tensor, name)] = _by_number
    for function in (torch.log_softmax, tensor.log_softmax, torch.nn.functional.log_softmax):
        known[function] = _log_softmax
    known |= {function: _reshape for function in (tensor.view, tensor.reshape, torch.reshape)}
    known |= {function: _flatten for function in (tensor.flatten, torch.flatten)}
    for name in ("transpose", "permute", "swapaxes", "swapdims"):
        known |= {getattr(tensor, name): _transpose, getattr(torch, name): _transpose}
    return known | {
        tensor.to: _to,
        tensor.contiguous: _same,
        tensor.__getitem__: _select,
        tensor.detach: _detach,
        torch.detach: _detach,
        tensor.register_hook: _register_hook,
    }


_RULES = _rules()

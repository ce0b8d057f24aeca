"""Recomputation: a module's activations are made again in the backward pass rather than kept.

PyTorch's own non-reentrant checkpoint does the work. What it leaves to its caller is done here: batch norms must count
a batch once although it passes twice, and modules whose second pass would see another state than the first must be
refused rather than give a wrong gradient.

The module's `forward` is replaced on the instance. So the user's hooks on the module itself run once per call, outside
of the checkpoint; hooks on modules inside of it run again with the recomputation.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from memfit.adapters.torch.stand_in import tensors_in
from memfit.core.errors import BadInput

# Of a Mersenne twister, as torch.get_rng_state gives it.
_GENERATOR_BYTES = 5056
_RUNNING = ("running_mean", "running_var", "num_batches_tracked")

Around = Callable[[str], AbstractContextManager[None]]


def recompute(
    model: torch.nn.Module, paths: Sequence[str], around: Around = lambda path: nullcontext()
) -> Callable[[], None]:
    """Has the activations of these modules computed again in the backward pass; returns what undoes it.

    Args:
        model: the module that holds them.
        paths: their dotted paths; none may be inside of another.
        around: entered with the path for each recomputation.
    """
    chosen = chosen_modules(model, paths, "checkpoint")
    undo = [without_cache(model)] if paths else []
    for path, module in chosen:
        undo.append(replaced_forward(module, _recomputed(path, module, around)))

    def undo_all() -> None:
        while undo:
            undo.pop()()

    return undo_all


def chosen_modules(model: torch.nn.Module, paths: Sequence[str], setting: str) -> list[tuple[str, torch.nn.Module]]:
    """The modules at `paths`; refuses what can't be replaced, or is there twice.

    Args:
        model: the module that holds them.
        paths: their dotted paths.
        setting: name of the setting that they come from, for messages.
    """
    found = [(path, _module_at(model, path, setting)) for path in paths]
    for index, (path, module) in enumerate(found):
        inside = {id(part) for part in module.modules()}
        for position, (other, further) in enumerate(found):
            if position != index and id(further) in inside:
                raise BadInput(_twice(path, other, setting))
        _check_plain(model, path, module, setting)
    return found


def _twice(path: str, other: str, setting: str) -> str:
    if path == other:
        return f"{setting} names {path!r} twice. Name each module once."
    return (
        f"{setting} names {path!r} and {other!r}, but {other!r} is part of {path!r}. Name only one of them: the outer "
        "one includes the inner one."
    )


def _module_at(model: torch.nn.Module, path: str, setting: str) -> torch.nn.Module:
    if not path:
        raise BadInput(
            f"{setting} names '' (the whole model), which would save nothing: the model's own recomputation needs as "
            "much as its plain step. Name modules inside of it."
        )
    try:
        return model.get_submodule(path)
    except AttributeError:
        parent = path
        while "." in parent:
            parent = parent.rpartition(".")[0]
            try:
                names = [f"{parent}.{name}" for name, _ in model.get_submodule(parent).named_children()]
                break
            except AttributeError:
                continue
        else:
            names = [name for name, _ in model.named_children()]
        raise BadInput(
            f"{setting} names {path!r}, but {type(model).__name__} has no such module. There are, for example: "
            f"{', '.join(names[:8]) or 'none'}. Was the plan made for another model?"
        ) from None


def _check_plain(model: torch.nn.Module, path: str, module: torch.nn.Module, setting: str) -> None:
    """Refuses TorchScript and compiled modules: they don't call the `forward` that is replaced."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise BadInput(
            f"{setting} names {path!r}, which is or holds a TorchScript module (torch.jit) and can't be changed. "
            "Use the nn.Module that it was made from."
        )
    names = path.split(".")
    above = [model.get_submodule(".".join(names[:end])) for end in range(len(names))]
    if any(_is_compiled(part) for part in (*above, *module.modules())):
        raise BadInput(
            f"{setting} names {path!r}, which is part of a compiled module (torch.compile). "
            "Apply the plan first and compile the model afterwards."
        )


def _is_compiled(module: torch.nn.Module) -> bool:
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


def replaced_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Puts `forward` on the instance; returns what puts back the one that was there."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = ReplacedForward(module, forward)

    def undo() -> None:
        if before is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = before

    return undo


class ReplacedForward:
    """The `forward` of one module, replaced; copies of the module, and what is saved of it, have the plain one.

    A function would go along with a copy and run the original's weights.

    Args:
        module: whose it is.
        forward: what is called instead.
    """

    def __init__(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        self._module = module
        self._forward = forward
        self._before = module.__dict__.get("forward")
        # For those who look at the names of its arguments.
        self.__wrapped__ = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs what stands in for the module's own."""
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._before is not None:
            return copy.deepcopy(self._before, memo)
        twin = copy.deepcopy(self._module, memo)
        return MethodType(type(twin).forward, twin)

    def __reduce__(self) -> Any:
        return getattr, (self._module, "forward")


def _recomputed(path: str, module: torch.nn.Module, around: Around) -> Callable[..., Any]:
    original = module.forward
    checked = False

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _Again(lambda: _recomputing(module, around(path)))

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        before = None if checked else _versions(module, args, kwargs)
        # Checkpoint saves positional tensors as autograd does, so that they may wait in host memory; and a module's own
        # keyword arguments may have the names of checkpoint's.
        names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
        others = {name: value for name, value in kwargs.items() if name not in names}

        state = _state_of_generator(module)
        # A number rather than the arguments: they would be kept by this function, wherever else they may wait.
        count = len(args)

        def run(*inputs: Any, state: torch.Tensor | None = state) -> Any:
            named = dict(zip(names, inputs[count:], strict=True))
            return original(*inputs[:count], **others, **named)

        value = checkpoint(
            run,
            *args,
            *(kwargs[name] for name in names),
            use_reentrant=False,
            preserve_rng_state=True,
            context_fn=contexts,
        )
        if before is not None:
            _check_unchanged(path, before)
            checked = True
        return value

    return forward


def _state_of_generator(module: torch.nn.Module) -> torch.Tensor | None:
    """What the state of the processor's generator takes, which checkpoint keeps: where the processor is simulated."""
    first = next(module.parameters(), None)
    if first is None or first.device.type != "cpu":
        return None
    with torch._C.DisableTorchFunction():
        if not first.is_meta:
            return None
    return torch.empty(_GENERATOR_BYTES, dtype=torch.uint8, device=first.device)


class _Again(AbstractContextManager[None]):
    """A context that is made anew each time: a graph that is kept is computed again by each backward pass.

    Args:
        make: makes it.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *failure: Any) -> bool | None:
        return self._entered.pop().__exit__(*failure)


@contextmanager
def _recomputing(module: torch.nn.Module, around: AbstractContextManager[None]) -> Iterator[None]:
    """For one recomputation: what batch norms count goes into copies that nobody keeps."""
    counting = [
        part
        for part in module.modules()
        if isinstance(part, _NormBase) and part.training and part._buffers.get("running_mean") is not None
    ]
    held = [(part._buffers, {name: part._buffers[name] for name in _RUNNING}) for part in counting]
    with around:
        try:
            for buffers, originals in held:
                # None instead would change how many tensors the norm saves, which checkpoint compares.
                buffers.update({name: None if b is None else b.detach().clone() for name, b in originals.items()})
            yield
        finally:
            for buffers, originals in held:
                buffers.update(originals)


_Versions = list[tuple[str, torch.Tensor, int]]


def _versions(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Versions:
    """What must not change while the module runs, each with how often it has changed so far."""
    found = [("one of its inputs", tensor) for tensor in tensors_in((args, kwargs))]
    for prefix, part in module.named_modules():
        if not isinstance(part, _NormBase):
            found += [
                (f"its buffer {f'{prefix}.{name}'.lstrip('.')!r}", buffer)
                for name, buffer in part._buffers.items()
                if buffer is not None
            ]
    return [(name, tensor, tensor._version) for name, tensor in found if not tensor.is_inference()]


def _check_unchanged(path: str, before: _Versions) -> None:
    for name, tensor, version in before:
        if tensor._version != version:
            raise BadInput(
                f"the module {path!r} can't be computed again: it changes {name} in place, so that its second pass "
                "would see another value than the first. Leave it out of checkpoint, or name a module that holds it "
                "and doesn't."
            )


def without_cache(model: torch.nn.Module) -> Callable[[], None]:
    """Switches off the key-value cache of transformers, which a recomputation would fill twice."""
    changed: list[Any] = []
    for config in _configurations(model):
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False
            changed.append(config)

    def undo() -> None:
        for config in changed:
            config.use_cache = True

    return undo


def _configurations(model: torch.nn.Module) -> Iterable[Any]:
    return {id(c): c for c in (m.__dict__.get("config") for m in model.modules()) if c is not None}.values()

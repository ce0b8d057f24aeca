"""Recomputation: a module's activations are made again in the backward pass rather than kept.

PyTorch's own non-reentrant checkpoint does the work. What it leaves to its caller is done here: batch norms must count
a batch once although it passes twice, and modules whose second pass would see another state than the first must be
refused rather than give a wrong gradient.

The module's `forward` is replaced on the instance. So the user's hooks on the module itself run once per call, outside
of the checkpoint; hooks on modules inside of it run again with the recomputation.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import MethodType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from memfit.core.errors import BadInput
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.apply.tensor_memory import simulated
from memfit.frameworks.torch.shapes.stand_in import tensors_in

# Of a Mersenne twister, as torch.get_rng_state gives it.
_GENERATOR_BYTES = 5056
_RUNNING = ("running_mean", "running_var", "num_batches_tracked")

Around = Callable[[str], AbstractContextManager[None]]


def recompute(
    model: torch.nn.Module, paths: Sequence[str], around: Around = lambda path: nullcontext()
) -> Callable[[], None]:
    """Has the activations of these modules computed again in the backward pass; returns what undoes it.

    None may be inside of another. `around` is entered with the path for each recomputation.
    """
    undo = ExitStack()
    chosen = chosen_modules(model, paths, "checkpoint")
    if chosen:
        undo.callback(without_cache(model))
    for path, module in chosen:
        undo.callback(replaced_forward(module, _recomputed(path, module, around)))
    return undo.close


def chosen_modules(model: torch.nn.Module, paths: Sequence[str], setting: str) -> list[tuple[str, torch.nn.Module]]:
    """The modules at `paths`, which come from a setting; refuses what can't be replaced, or is there twice."""
    chosen = [(path, _module_at(model, path, setting)) for path in paths]
    for index, (path, module) in enumerate(chosen):
        inside = {id(part) for part in module.modules()}
        for other, further in (*chosen[:index], *chosen[index + 1 :]):
            if path == other:
                raise BadInput(f"{setting} names {path!r} twice. Name each module once.")
            if id(further) in inside:
                raise BadInput(
                    f"{setting} names {path!r} and {other!r}, but {other!r} is part of {path!r}. Name only one of "
                    "them: the outer one includes the inner one."
                )
        # TorchScript and compiled modules don't call the `forward` that is replaced.
        if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
            raise BadInput(
                f"{setting} names {path!r}, which is or holds a TorchScript module (torch.jit) and can't be changed. "
                "Use the nn.Module that it was made from."
            )
        names = path.split(".")
        above = [model.get_submodule(".".join(names[:end])) for end in range(len(names))]
        if any(internals.is_compiled(part) for part in (*above, *module.modules())):
            raise BadInput(
                f"{setting} names {path!r}, which is part of a compiled module (torch.compile). "
                "Apply the plan first and compile the model afterwards."
            )
    return chosen


def _module_at(model: torch.nn.Module, path: str, setting: str) -> torch.nn.Module:
    if not path:
        raise BadInput(
            f"{setting} names '' (the whole model), which would save nothing: the model's own recomputation needs as "
            "much as its plain step. Name modules inside of it."
        )
    known: dict[str, torch.nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if path in known:
        return known[path]
    parent = path
    while parent and (parent := parent.rpartition(".")[0]) not in known:
        pass
    names = [f"{parent}.{name}".lstrip(".") for name, _ in known[parent].named_children()]
    raise BadInput(
        f"{setting} names {path!r}, but {type(model).__name__} has no such module. There are, for example: "
        f"{', '.join(names[:8]) or 'none'}. Was the plan made for another model?"
    )


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

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        before = [] if checked else _versions(module, args, kwargs)
        # Checkpoint saves positional tensors as autograd does, so that they may wait in host memory; and a module's own
        # keyword arguments may have the names of checkpoint's.
        names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
        others = {name: value for name, value in kwargs.items() if name not in names}
        first = next(module.parameters(), None)
        on_simulated_host = first is not None and first.device.type == "cpu" and simulated(first)
        # Where the processor is simulated, checkpoint keeps the state of its generator without anybody counting it.
        state = torch.empty(_GENERATOR_BYTES, dtype=torch.uint8, device="cpu") if on_simulated_host else None
        # A number rather than the arguments: they would be kept by this function, wherever else they may wait.
        count = len(args)

        def run(*inputs: Any, state: torch.Tensor | None = state) -> Any:
            return original(*inputs[:count], **others, **dict(zip(names, inputs[count:], strict=True)))

        value = checkpoint(
            run,
            *args,
            *(kwargs[name] for name in names),
            use_reentrant=False,
            preserve_rng_state=True,
            context_fn=lambda: (nullcontext(), _Recomputation(module, lambda: around(path))),
        )
        for name, tensor, version in before:
            if internals.version_of(tensor) != version:
                raise BadInput(
                    f"the module {path!r} can't be computed again: it changes {name} in place, so that its second pass "
                    "would see another value than the first. Leave it out of checkpoint, or name a module that holds "
                    "it and doesn't."
                )
        checked = True
        return value

    return forward


class _Recomputation(AbstractContextManager[None]):
    """What batch norms count goes into copies that nobody keeps; entered for each backward pass of a graph."""

    def __init__(self, module: torch.nn.Module, around: Callable[[], AbstractContextManager[None]]) -> None:
        self._module = module
        self._around = around
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._around())
            for part in self._module.modules():
                buffers = internals.buffers_of(part)
                if isinstance(part, internals.NormBase) and part.training and buffers.get("running_mean") is not None:
                    originals = {name: buffers[name] for name in _RUNNING}
                    stack.callback(buffers.update, originals)
                    # None instead would change how many tensors the norm saves, which checkpoint compares.
                    buffers.update({name: None if b is None else b.detach().clone() for name, b in originals.items()})
            self._entered.append(stack.pop_all())

    def __exit__(self, *failure: Any) -> bool | None:
        return self._entered.pop().__exit__(*failure)


def _versions(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, torch.Tensor, int]]:
    """What must not change while the module runs, each with how often it has changed so far."""
    tensors = [("one of its inputs", tensor) for tensor in tensors_in((args, kwargs))]
    for prefix, part in module.named_modules():
        if not isinstance(part, internals.NormBase):
            buffers = ((name, buffer) for name, buffer in internals.buffers_of(part).items() if buffer is not None)
            tensors += [(f"its buffer {f'{prefix}.{name}'.lstrip('.')!r}", buffer) for name, buffer in buffers]
    return [(name, tensor, internals.version_of(tensor)) for name, tensor in tensors]


def without_cache(model: torch.nn.Module) -> Callable[[], None]:
    """Switches off the key-value cache of transformers, which a recomputation would fill twice."""
    configurations = {id(config): config for module in model.modules() if (config := module.__dict__.get("config"))}
    changed = [one for one in configurations.values() if getattr(one, "use_cache", None) is True]

    def set_all(use_cache: bool) -> None:
        for configuration in changed:
            configuration.use_cache = use_cache

    set_all(False)
    return lambda: set_all(True)

"""The fitted step: a model and an optimizer, run as the settings of a plan say.

The same code runs on the user's own objects and, inside of the tracer, on shapes: what a traced peak proves is what
will run.
"""

import math
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from memfit.core.env import allocator_settings, set_allocator_settings
from memfit.core.errors import BadBatch, BadInput, BadLoss
from memfit.core.settings import Settings
from memfit.core.timeline import Phase
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.apply.activation_offload import Offload
from memfit.frameworks.torch.apply.loss_function import as_loss
from memfit.frameworks.torch.apply.low_rank import add_adapters
from memfit.frameworks.torch.apply.micro_batches import shares, split
from memfit.frameworks.torch.apply.optimizers import FittedOptimizer
from memfit.frameworks.torch.apply.recomputation import recompute, replaced_forward
from memfit.frameworks.torch.apply.tensor_memory import simulated
from memfit.frameworks.torch.shapes import failures
from memfit.frameworks.torch.shapes.batch import common_first_dimension
from memfit.frameworks.torch.shapes.stand_in import map_tensors
from memfit.frameworks.torch.shapes.tensor_types import AUTOCAST

# Models that a plan runs at the moment.
_FITTED: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()


class Fitted:
    """A model and its optimizer, run as `settings` say; `step` runs one update.

    Changes the objects it is given; `close`, or leaving it as a context manager, puts them back. A loss function
    takes the model and a batch, any nesting of tensors, and returns the scalar loss or (loss, weight).

    Args:
        settings: how to run the step.
        model: the module.
        optimizer: over its parameters, or None.
        observe: told each phase where it begins, for each micro-batch.
        around: entered with the path of a module for each of its recomputations.
        updating: entered for each update that the backward pass makes.
        most_parts: the number of micro-batches after which a step is cut short, for a trace; None runs them all.
    """

    def __init__(
        self,
        settings: Settings,
        model: torch.nn.Module,
        optimizer: Any = None,
        observe: Callable[[Phase], None] = lambda phase: None,
        *,
        around: Callable[[str], AbstractContextManager[None]] = lambda path: nullcontext(),
        updating: Callable[[], AbstractContextManager[Any]] = nullcontext,
        most_parts: int | None = None,
    ) -> None:
        _check(settings, optimizer)
        check_unfitted(model)
        if settings.compile and internals.is_compiled(model):
            raise BadInput(
                "the plan compiles the model, but the model given is compiled already. Give the module that it was "
                "made of, or plan for the compiled one."
            )
        self.settings = settings
        self.model = model
        self.optimizer = self._original = optimizer
        self.scaler: torch.amp.GradScaler | None = None
        self._unscaled = False
        self._is_empty = False
        """Whether the last batch had nothing that counts: no update then."""
        self._observe = observe
        self._most_parts = most_parts
        self._host: list[Any] = []
        with ExitStack() as undo:
            self._fit_model(undo, around)
            if settings.precision == "amp-fp16":
                # Shapes have no infinities to look for.
                self.scaler = torch.amp.GradScaler(_device_type(model), enabled=not _is_simulated(model))
            if optimizer is not None:
                fitted = FittedOptimizer(settings, optimizer, model, updating)
                self._host.append(fitted)
                undo.callback(fitted.undo)
                self.optimizer = fitted.in_use
            _FITTED.add(model)
            undo.callback(_FITTED.discard, model)
            self._undo = undo.pop_all()

    def _fit_model(self, undo: ExitStack, around: Callable[[str], AbstractContextManager[None]]) -> None:
        settings, model = self.settings, self.model
        if settings.expandable_segments and torch.cuda.is_available() and not _is_simulated(model):
            undo.callback(_expand_segments())
        if settings.lora_rank or settings.quantized_base or settings.freeze:
            undo.callback(
                add_adapters(model, settings.lora_rank, quantized=settings.quantized_base, freeze=settings.freeze)
            )
        if settings.channels_last:
            undo.callback(_with_channels_last(model, self.optimizer))
        if settings.checkpoint:
            undo.callback(recompute(model, settings.checkpoint, around))
        if settings.offload:
            waiting = Offload(model, settings.offload)
            self._host.append(waiting)
            undo.callback(waiting)
        if settings.num_devices > 1:
            from memfit.frameworks.torch.apply.sharding import shard

            shards = shard(model, settings.num_devices, offload=settings.shard_offload, optimizer=self.optimizer)
            self._host.append(shards)
            undo.callback(shards)
        if settings.compile:
            # After all that changes what modules do. Names of parameters stay, and modules whose code is PyTorch's own
            # are compiled, too: `model.compile()` leaves those out.
            undo.callback(replaced_forward(model, torch.compile(model.forward)))

    @property
    def host_bytes(self) -> int:
        """The greatest number of bytes that waited in host memory at once."""
        return sum(part.host_bytes for part in self._host)

    def step(self, loss: Callable[[Any, Any], Any] | None = None, batch: Any = ...) -> torch.Tensor:
        """Runs one update with the whole batch; returns its loss, detached."""
        if batch is ...:
            raise BadBatch(
                "step needs a batch: step(loss, batch), or step(batch=batch) where the model returns its loss."
            )
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self._observe(Phase.OPTIMIZER)
            value: torch.Tensor = self.optimizer.step(lambda: self.accumulate(loss, batch))
            return value
        value = self.accumulate(loss, batch)
        self.update()
        return value

    def backward(self, loss: Callable[[Any, Any], Any] | None, batch: Any) -> torch.Tensor:
        """Leaves the gradients of the whole batch in `.grad`, to be clipped before `update`; returns its loss."""
        if self.settings.step_in_backward:
            raise BadInput(
                "the plan updates each parameter inside of the backward pass, so that no gradients are left to clip or "
                "look at. Call step(loss, batch), or plan with allow=[..., '-step-in-backward']."
            )
        return self.accumulate(loss, batch)

    def accumulate(self, loss: Callable[[Any, Any], Any] | None, batch: Any) -> torch.Tensor:
        """Runs forward and backward pass of every part; returns the loss of the batch, detached."""
        parts = split(batch, self.num_parts(batch))
        weights = shares(parts, self.settings.weighting)
        self.clear_gradients()
        if self.scaler is not None and self._unscaled:
            # Gradients that were never used for an update.
            self.scaler.update()
            self._unscaled = False
        losses: list[torch.Tensor] = []
        whole = 0.0
        for index in range(len(parts[: self._most_parts])):
            # The part, and what it became on the device, is gone when the next one begins.
            part, parts[index] = parts[index], None
            # Ranks that share parameters run every part together, also those that count for nothing here.
            if weights[index] or self.settings.num_devices > 1:
                value, weight = self._part(loss, part, weights[index], alone=len(parts) == 1)
                whole += weight
                if value is not None:
                    losses.append(value)
        self._is_empty = not losses
        if self.scaler is not None and self.optimizer is not None and losses:
            self.scaler.unscale_(self.optimizer)
            self._unscaled = True
        if not losses:
            return torch.tensor(math.nan, device=_device(self.model))
        total = sum(losses[1:], losses[0])
        if self.settings.weighting.kind == "given" and len(parts) > 1:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(1 / whole)
            total = total / whole
        return total

    def num_parts(self, batch: Any) -> int:
        """Parts of this batch: as planned, fewer for a smaller batch at the end of an epoch, more for a larger one."""
        settings = self.settings
        num_samples = common_first_dimension(batch) if settings.micro_batches > 1 else None
        if num_samples is None:
            return settings.micro_batches
        if not num_samples:
            raise BadBatch("the batch is empty: its tensors have no samples. Give at least 1.")
        if settings.micro_batch_size:
            return -(-num_samples // settings.micro_batch_size)
        return min(settings.micro_batches, num_samples)

    def update(self) -> None:
        """Updates the parameters by the gradients that are there."""
        self._observe(Phase.OPTIMIZER)
        if self.optimizer is None or self._is_empty:
            return
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self._unscaled = False
        else:
            self.optimizer.step()

    def clear_gradients(self) -> None:
        """Frees or zeroes all gradients."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=self.settings.set_to_none)
        self.model.zero_grad(set_to_none=self.settings.set_to_none)

    def close(self) -> None:
        """Puts model and optimizer back as they were; gradients stay."""
        self._undo.close()
        self.optimizer = self._original

    def __repr__(self) -> str:
        parts = f", {self.settings.micro_batches} micro-batches" if self.settings.micro_batches > 1 else ""
        optimizer = "" if self.optimizer is None else f" with {type(self.optimizer).__name__}"
        return f"<Fitted {type(self.model).__name__}{optimizer}{parts}>"

    def __enter__(self) -> "Fitted":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _part(
        self, loss: Callable[[Any, Any], Any] | None, part: Any, share: float, *, alone: bool
    ) -> tuple[torch.Tensor | None, float]:
        """(the weighted loss of one micro-batch, its weight); its gradients have been added.

        The loss is None where the weight is 0: a mean over nothing is no number, and must not spoil the others.
        """
        self._observe(Phase.FORWARD)
        value, given = self.forward(loss, part)
        del part
        by_weight = self.settings.weighting.kind == "given"
        if (given is None) == by_weight:
            raise BadLoss(
                "the loss function must return (loss, weight), where the weight is what the loss was divided by, in "
                "every step or in none, as it did when the step was planned."
            )
        weight = 1.0 if given is None else given
        if by_weight and not alone:
            share = weight
            if not weight and self.settings.num_devices == 1:
                return None, 0.0
        if not share:
            # A mean over nothing is no number.
            value = value.nan_to_num()
        if share != 1.0:
            value = value * share
        self._observe(Phase.BACKWARD)
        (value if self.scaler is None else self.scaler.scale(value)).backward()
        # A loss can be a view of something large.
        return value.detach().clone(), weight

    def forward(self, loss: Callable[[Any, Any], Any] | None, part: Any) -> tuple[torch.Tensor, float | None]:
        """Runs the loss function on one part of a batch; (its loss, the weight that it gave, or None)."""
        device = _device(self.model) if self.settings.num_devices == 1 else None

        def prepared(tensor: torch.Tensor) -> torch.Tensor:
            """On the model's device, in the memory format of its convolutions."""
            if device is not None and tensor.device != device:
                tensor = tensor.to(device, non_blocking=True)
            if self.settings.channels_last and tensor.dim() == 4 and tensor.layout is torch.strided:
                tensor = tensor.to(memory_format=torch.channels_last)
            return tensor

        part = map_tensors(part, prepared)
        dtype, chunks = AUTOCAST.get(self.settings.precision or ""), self.settings.cross_entropy_chunks
        with ExitStack() as around:
            if dtype is not None:
                around.enter_context(torch.autocast(_device_type(self.model), dtype=dtype))
            if chunks:
                from memfit.frameworks.torch.apply.chunked_loss import chunked_cross_entropy

                around.enter_context(chunked_cross_entropy(chunks))
            value = as_loss(loss)(self.model, part)
        given: float | None = None
        if isinstance(value, tuple) and len(value) == 2:
            value, weight = value
            given = 1.0 if isinstance(weight, torch.Tensor) and simulated(weight) else float(weight)
            if not math.isfinite(given) or given < 0:
                raise BadLoss(f"the loss function returned the weight {given}, but it must be 0 or more.")
        failures.check_loss(value)
        return value, given


def check_unfitted(model: torch.nn.Module) -> None:
    """Refuses a model that a plan runs at the moment."""
    if model in _FITTED:
        raise BadInput(
            "the model is run by a plan already, and two would undo each other. Call close() on the Fitted that the "
            "first apply returned, or on the guard that has it, or leave its `with` block."
        )


def _check(settings: Settings, optimizer: Any) -> None:
    """Refuses settings that exclude each other."""
    if settings.micro_batches < 1:
        raise BadInput(f"micro_batches must be at least 1, but {settings.micro_batches} was given.")
    if settings.precision is not None and settings.precision not in AUTOCAST:
        raise BadInput(f"precision must be one of {', '.join(AUTOCAST)}, or None, not {settings.precision!r}.")
    if settings.step_in_backward and settings.micro_batches > 1:
        raise BadInput(
            f"step_in_backward updates each parameter as soon as its gradient is there, so it can't add up the "
            f"gradients of {settings.micro_batches} micro-batches. Set micro_batches to 1, or leave step_in_backward."
        )
    if settings.step_in_backward and settings.precision == "amp-fp16":
        raise BadInput(
            "step_in_backward can't go with precision 'amp-fp16': whether a step must be skipped is only known when "
            "all gradients are there. Use 'amp-bf16', or leave step_in_backward."
        )
    if isinstance(optimizer, torch.optim.LBFGS) and (settings.precision == "amp-fp16" or settings.step_in_backward):
        raise BadInput(
            "LBFGS computes the loss several times an update, which goes neither with precision 'amp-fp16' nor with "
            "step_in_backward. Leave both, or take another optimizer."
        )
    if settings.compile and (settings.checkpoint or settings.offload or settings.num_devices > 1):
        raise BadInput(
            "compile goes with neither checkpoint nor offload, because the compiler decides what is kept for the "
            "backward pass, nor with several devices. Leave one of them."
        )
    inner = [p for p in settings.offload if any(p.startswith(f"{outer}.") for outer in settings.checkpoint)]
    if inner:
        raise BadInput(
            f"offload names {inner[0]!r}, which is part of a module that checkpoint names: nothing inside of it is "
            "saved. Name the same module in both, which offloads its inputs to host memory, or leave one."
        )


def _is_simulated(model: torch.nn.Module) -> bool:
    # A shard is what holds memory.
    return any(simulated(getattr(parameter, "_local_tensor", parameter)) for parameter in model.parameters())


def _device(model: torch.nn.Module) -> torch.device | None:
    """Where the model is; None where it is in several places or nowhere."""
    devices = {parameter.device for parameter in model.parameters()}
    return devices.pop() if len(devices) == 1 else None


def _device_type(model: torch.nn.Module) -> str:
    return next((parameter.device.type for parameter in model.parameters()), "cpu")


def _with_channels_last(model: torch.nn.Module, optimizer: Any) -> Callable[[], None]:
    """Gives the convolutions' weights, and their state, the memory format; returns what undoes it."""
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 4]
    changed: list[Any] = [w for w in weights if not w.is_contiguous(memory_format=torch.channels_last)]

    def set_format(memory_format: torch.memory_format) -> None:
        states = getattr(optimizer, "state", None) or {}
        for tensor in changed:
            # The same object keeps its place in the optimizer.
            tensor.data = tensor.data.contiguous(memory_format=memory_format)
            if tensor.grad is not None:
                tensor.grad.data = tensor.grad.data.contiguous(memory_format=memory_format)
            # Fused kernels walk through the memory of a parameter and of its state side by side.
            state = states.get(tensor, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == tensor.shape:
                    state[name] = value.contiguous(memory_format=memory_format)

    set_format(torch.channels_last)
    return lambda: set_format(torch.contiguous_format)


def _expand_segments() -> Callable[[], None]:
    """Asks PyTorch's CUDA allocator for segments that can grow; returns what takes back the request."""
    wanted = "expandable_segments:True"
    given = allocator_settings()
    if wanted in given:
        return lambda: None
    if torch.cuda.is_initialized():
        warnings.warn(
            "expandable_segments can't be switched on any more: CUDA is in use already. Start the program with "
            f"PYTORCH_CUDA_ALLOC_CONF={wanted}.",
            stacklevel=4,
        )
        return lambda: None
    set_allocator_settings(",".join(filter(None, (given, wanted))))
    return lambda: set_allocator_settings(given)

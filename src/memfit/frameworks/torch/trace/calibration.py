"""Real times on the machine in hand: passes of the user's step, updates of the optimizer, the host's own rates.

Time models are wrong by factors on processors whose caches and kernels nobody described; a few seconds of measuring
are right to percents. Everything runs on copies (`restoring`), no update is made, and the total time is bounded.

Totals are measured without hooks. The shares of modules come from one more pass with a hook before and after each call.

On CUDA the same code waits for the device around each pass. It was written by the book and never run on a GPU.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from functools import cache
from typing import Any

import torch

from memfit.core.errors import BadInput
from memfit.core.profile import Measurement
from memfit.core.settings import OptimizerKernels, Settings
from memfit.core.units import MIB
from memfit.frameworks.torch.apply.fitted import Fitted
from memfit.frameworks.torch.apply.single_updates import scratch_copy
from memfit.frameworks.torch.shapes.batch import common_first_dimension
from memfit.frameworks.torch.shapes.failures import check_loss, explained
from memfit.frameworks.torch.shapes.stand_in import map_tensors
from memfit.frameworks.torch.shapes.tensor_types import AUTOCAST, WEIGHTS
from memfit.frameworks.torch.trace.loss_probe import part_of
from memfit.frameworks.torch.trace.real_runs import restoring

_MAX_TURNS = 15
# Of the fastest time, what others may be slower after one turn without dropping out; less after more turns.
_CHANCE = 0.3
# Turns after which a single fast or slow moment no longer decides.
_FEWEST_TURNS = 3
# Turns after which those that differ by less than this are as good as each other.
_TURNS_TO_EQUAL = 6
_EQUAL = 0.01
_MAX_REPEATS = 7

# Scratch memory of an optimizer's update: parameters, gradients and two moments of this size, as Adam has.
_SCRATCH_BYTES = 16 * MIB
_NUM_LARGE = 4
_NUM_SMALL = 64
_SMALL_ELEMENTS = 64
_MAX_UPDATES = 6
_UPDATE_SECONDS = 0.2

_MATRIX = 1024
_COPY_BYTES = 32 * MIB
_RATE_SECONDS = 0.04


def measure(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    batch_sizes: Sequence[int],
    precision: str | None = None,
    *,
    limit_seconds: float = 3.0,
) -> tuple[Measurement, ...]:
    """Times of real forward and backward passes, by batch size, smallest first, in about `limit_seconds`.

    Sizes are tried in the order given; those for which no time is left, or which fail where another didn't, are
    missing. One pass of the first is always made, however long it takes. Sizes above that of the batch repeat its
    samples; without a common first dimension it is run whole.
    """
    sizes = list(dict.fromkeys(batch_sizes))
    found: list[Measurement] = []
    with restoring(model, loss):
        passes = _TimedPasses(model, loss, precision)
        end = time.perf_counter() + limit_seconds
        for index, size in enumerate(sizes):
            left = end - time.perf_counter()
            # The least is one pass, and a forward pass with hooks.
            if found:
                last = found[-1]
                if 1.5 * (last.forward_seconds + last.backward_seconds) * size / last.batch_size > left:
                    continue
            try:
                found.append(passes.measure(_resized(batch, size), size, left * size / sum(sizes[index:])))
            except Exception:
                if not found:
                    raise
    return tuple(sorted(found, key=lambda one: one.batch_size))


def time_passes(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    plans: Sequence[Settings],
    *,
    batch_size: int | None = None,
    limit_seconds: float = 20.0,
) -> list[float | None]:
    """Seconds of the forward and backward passes of one update, as each of several settings runs them.

    None for those for which there was no time; the first is run however long that takes. What settings say of the
    optimizer is left out. `batch_size` is that of an update, where it isn't the size of `batch`.
    """
    whole = batch if batch_size is None else _resized(batch, batch_size)
    with restoring(model, loss):
        wait = _TimedPasses(model, loss, None).wait

        def run(settings: Settings) -> float:
            with Fitted(settings, model) as fitted:
                wait()
                begun = time.perf_counter()
                fitted.accumulate(loss, whole)
                wait()
                seconds = time.perf_counter() - begun
                model.zero_grad(set_to_none=True)
            return seconds

        # Plans that differ in their update only have the same passes, which are timed once.
        found = race((settings.of_passes for settings in plans), run, time.perf_counter() + limit_seconds)
    return [found.get(settings.of_passes) for settings in plans]


def race(runners: Iterable[Settings], run: Callable[[Settings], float], end: float) -> dict[Settings, float]:
    """Seconds of each of several settings; those that haven't run by `end`, but for the first, are missing.

    They take turns, there and back again, so that what else the machine does meanwhile hits all alike, and are compared
    within a turn: a machine has faster moments, and the least time of a few goes to whoever met one. Those that are
    clearly slower drop out, which leaves the time to those that are close.
    """
    times: dict[Settings, list[float]] = {}
    for runner in runners:
        if not times or (runner not in times and time.perf_counter() < end):
            times[runner] = [run(runner)]
    running = list(times)

    def paces() -> list[float]:
        """The mean of each turn of those that ran in all of them."""
        return [statistics.geometric_mean(turn) for turn in zip(*(times[one] for one in running), strict=True)]

    def score(runner: Settings) -> float:
        return statistics.median(one / pace for one, pace in zip(times[runner], paces(), strict=False))

    for turns in range(1, _MAX_TURNS + 1):
        if time.perf_counter() + sum(times[runner][-1] for runner in running) >= end:
            break
        for runner in running[::-1] if turns % 2 else running:
            # The first turn of all is a warm-up, unless there is no time for another.
            times[runner] = [*(times[runner] if turns > 1 else []), run(runner)]
        if turns >= _FEWEST_TURNS:
            scores = {runner: score(runner) for runner in running}
            best = min(scores.values())
            running = [runner for runner in running if scores[runner] <= best * (1 + _CHANCE / turns)]
            are_equal = turns >= _TURNS_TO_EQUAL and max(map(score, running)) <= (1 + _EQUAL) * min(map(score, running))
            if len(running) == 1 or are_equal:
                break
    return {runner: score(runner) * statistics.median(paces()) for runner in times}


def _resized(batch: Any, size: int) -> Any:
    """`size` samples of the batch, from the beginning again where it has fewer."""
    num_samples = common_first_dimension(batch)
    if num_samples is None or num_samples == size:
        return batch
    if size < num_samples:
        return part_of(batch, 0, size)
    rows = torch.arange(size) % num_samples
    return map_tensors(batch, lambda tensor: tensor[rows.to(tensor.device)] if tensor.dim() else tensor)


class _TimedPasses:
    """Runs forward and backward passes of a module whose tensors are copies, and watches the clock."""

    def __init__(self, model: torch.nn.Module, loss: Callable[[Any, Any], Any], precision: str | None) -> None:
        self._model = model
        self._loss = loss
        self._dtype = WEIGHTS.get(precision or "")
        if self._dtype is not None:
            model.to(self._dtype)
        self._on_cuda = any(parameter.is_cuda for parameter in model.parameters())
        self._autocast_dtype = AUTOCAST.get(precision or "")

    def measure(self, batch: Any, size: int, share_seconds: float) -> Measurement:
        """The median of a few passes within about `share_seconds`."""
        begun = time.perf_counter()
        times = [self._run(batch)]
        step = sum(times[0])
        left = share_seconds - (time.perf_counter() - begun)
        # The first pass is a warm-up, unless it takes so long that nothing else counts.
        if left > 1.5 * step:
            times = [self._run(batch)]
            left = share_seconds - (time.perf_counter() - begun)
            # One more is run with hooks, in the forward pass only.
            repeats = min(_MAX_REPEATS, int((left - times[0][0]) / max(sum(times[0]), 1e-6)))
            times += [self._run(batch) for _ in range(repeats)]
        forward = statistics.median(time for time, _ in times)
        backward = statistics.median(time for _, time in times)
        return Measurement(size, forward, backward, self._unit_seconds(batch, forward))

    def _run(self, batch: Any) -> tuple[float, float]:
        """Seconds of a forward and of a backward pass."""
        batch = self._own(batch)
        self.wait()
        begun = time.perf_counter()
        value = self._forward(batch)
        self.wait()
        middle = time.perf_counter()
        with explained("backward"):
            value.backward()
        self.wait()
        end = time.perf_counter()
        self._model.zero_grad(set_to_none=True)
        return middle - begun, end - middle

    def _forward(self, batch: Any) -> torch.Tensor:
        kind = "cuda" if self._on_cuda else "cpu"
        autocast = nullcontext() if self._autocast_dtype is None else torch.autocast(kind, dtype=self._autocast_dtype)
        with autocast, explained("forward"):
            value = self._loss(self._model, batch)
        loss: torch.Tensor = value[0] if isinstance(value, tuple | list) and len(value) == 2 else value
        check_loss(loss)
        return loss

    def _own(self, batch: Any) -> Any:
        """A copy: losses may change what they are given."""

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            dtype = self._dtype if tensor.is_floating_point() else None
            return tensor.detach().to(dtype=dtype, copy=True).requires_grad_(tensor.requires_grad)

        return map_tensors(batch, copied)

    def wait(self) -> None:
        """Waits for what the device still computes."""
        if self._on_cuda:
            torch.cuda.synchronize()

    def _unit_seconds(self, batch: Any, forward_seconds: float) -> dict[str, float]:
        """Forward time of each module that is called, by hooks before and after."""
        batch = self._own(batch)
        found: dict[str, float] = {}
        calls: list[tuple[str, float]] = []

        def begin(path: str) -> None:
            self.wait()
            calls.append((path, time.perf_counter()))

        def end(path: str) -> None:
            self.wait()
            # A call that raised, and was caught by the user's code, has no end.
            while calls and calls[-1][0] != path:
                calls.pop()
            # Calls inside of a call of the same module are part of that one.
            if calls and all(path != outer for outer, _ in calls[:-1]):
                found[path] = found.get(path, 0.0) + time.perf_counter() - calls[-1][1]
            del calls[-1:]

        with ExitStack() as stack:
            for path, module in self._model.named_modules():
                if path:
                    before = module.register_forward_pre_hook(lambda *_, path=path: begin(path))
                    after = module.register_forward_hook(lambda *_, path=path: end(path))
                    stack.callback(before.remove)
                    stack.callback(after.remove)
            self.wait()
            begun = time.perf_counter()
            self._forward(batch)
            self.wait()
            total = max(time.perf_counter() - begun, 1e-9)
        # Passes differ: the shares are this one's, the total that of the passes without hooks.
        return {path: min(1.0, seconds / total) * forward_seconds for path, seconds in found.items()}


@cache
def rates() -> tuple[float, float]:
    """(float32 operations of a large matrix product, bytes read and written by a large copy) per second."""
    with torch.inference_mode():
        left, right = torch.ones(_MATRIX, _MATRIX), torch.ones(_MATRIX, _MATRIX)
        product = torch.empty(_MATRIX, _MATRIX)
        multiply = fastest(lambda: torch.mm(left, right, out=product), _RATE_SECONDS)
        source, target = torch.ones(_COPY_BYTES, dtype=torch.uint8), torch.ones(_COPY_BYTES, dtype=torch.uint8)
        copy = fastest(lambda: target.copy_(source), _RATE_SECONDS)
    return 2 * _MATRIX**3 / multiply, 2 * _COPY_BYTES / copy


def fastest(work: Callable[[], Any], seconds: float, most: float = math.inf) -> float:
    """Of runs for so many seconds, one to warm up and two at least, the one that nothing else disturbed."""
    work()
    times: list[float] = []
    while len(times) < 2 or (sum(times) < seconds and len(times) < most):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)


def update_seconds(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[OptimizerKernels, float]:
    """Seconds of one update of the model's trained parameters by each kind of kernels that the optimizer has.

    By copies over tensors of their own: many small ones give the cost of a tensor, few large ones that of a byte. Empty
    where the optimizer can't be copied, or needs a closure.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained or isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        return {}
    first = max(trained, key=lambda parameter: parameter.numel())
    total_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    found: dict[OptimizerKernels, float] = {}
    for kernels in OptimizerKernels:
        try:
            small = _time_update(optimizer, kernels, first, _NUM_SMALL, _SMALL_ELEMENTS) / _NUM_SMALL
            elements = _SCRATCH_BYTES // first.element_size() // _NUM_LARGE
            large = _time_update(optimizer, kernels, first, _NUM_LARGE, elements)
        except Exception:
            # No such kernels for this optimizer, dtype or device.
            continue
        per_byte = max(0.0, large - _NUM_LARGE * small) / _SCRATCH_BYTES
        found[kernels] = small * len(trained) + per_byte * total_bytes
    return found if OptimizerKernels.KEEP in found else {}


def _time_update(
    optimizer: torch.optim.Optimizer, kernels: OptimizerKernels, like: torch.Tensor, number: int, elements: int
) -> float:
    device = torch.device("cpu") if like.is_meta else like.device
    with torch.inference_mode(False):
        parameters = [
            torch.nn.Parameter(torch.full((elements,), 0.5, dtype=like.dtype, device=device)) for _ in range(number)
        ]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.01)
        scratch = _with_kernels(optimizer, kernels, parameters)

        def update() -> None:
            scratch.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        # The first one makes the state.
        return fastest(update, _UPDATE_SECONDS, _MAX_UPDATES)


def _with_kernels(
    optimizer: torch.optim.Optimizer, kernels: OptimizerKernels, parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer with the same settings over other parameters; fails where it has no such kernels."""
    scratch = scratch_copy(optimizer, parameters)
    (group,) = scratch.param_groups
    changes: dict[str, bool | None] = {}
    if kernels is OptimizerKernels.FUSED:
        changes = {"foreach": None, "fused": True}
    elif kernels is OptimizerKernels.SINGLE:
        changes = {"foreach": False, "fused": None}
    if changes.get("fused") and "fused" not in group:
        raise BadInput(f"{type(optimizer).__name__} has no fused kernels.")
    group.update({name: value for name, value in changes.items() if name in group})
    return scratch

"""One update of the parameters as a transaction: either it happens, or everything is as it was before.

Nothing that lasts changes before the update itself, so an accumulation window that runs out of memory is undone by
dropping its gradients and setting random states and buffers back. Its batches are kept by reference, and the whole
window is run again from the random state that it began with: gradients that were half added up can't be told apart.
Random numbers go on from batch to batch, for parts of a batch may draw more of them than the batch as a whole, and the
next one would have begun there; only a generator that the program has drawn from between two batches, such as to
augment the data, is set to where the second one began. The update changes parameters in place and can't be undone;
`Update` sees to it that it can't fail half-way.

Batch norms normalise each micro-batch by its own mean and variance; no running of parts one after the other can give
all of them those of the whole. What can be had is kept: a layer's running statistics are updated once, with the mean
and the variance of all that passed through it, put together from those of the parts.
"""

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from memfit.core import heap
from memfit.core.guarding import CannotFit, MemoryFailure, Where
from memfit.core.oom import caught
from memfit.core.settings import Settings
from memfit.frameworks.torch import internals, oom
from memfit.frameworks.torch.apply.fitted import Fitted
from memfit.frameworks.torch.apply.micro_batches import raw_weights, split
from memfit.frameworks.torch.guard.ranks import TrainingRanks
from memfit.frameworks.torch.guard.snapshot import RandomState, WindowSnapshot
from memfit.frameworks.torch.guard.update import Update
from memfit.frameworks.torch.shapes.batch import common_first_dimension
from memfit.frameworks.torch.shapes.stand_in import tensors_in
from memfit.frameworks.torch.trace.loss_probe import part_of
from memfit.frameworks.torch.trace.real_runs import held_by

_CHANGED_BATCH = (
    "memory ran out, and the step can't be run again: its batch was changed in place, by the loss function or by a "
    "loader that uses its tensors again, and its values are lost. Let the loss function change a copy, or have the "
    "loader make new tensors."
)

Loss = Callable[[Any, Any], Any] | None
Passes = Callable[[Any, float], torch.Tensor]
"""Forward and backward pass of a part whose loss counts by a factor; returns the loss, detached, without the factor."""


@dataclass(slots=True)
class WindowBatch:
    """One batch of an accumulation window, as it can be run again."""

    loss: Loss
    batch: Any
    random_state: RandomState
    passes: Passes | None = None
    """How a library with a training loop of its own runs it, and weighs it in its window; None: plain passes."""
    value: torch.Tensor | None = None  # its loss, detached, once it has been run; None where nothing counted
    weight: float | None = None
    """What its gradients have yet to be divided by, together with those of the others; None: nothing."""
    num_parts: int = 1
    ended: RandomState | None = None  # the random state after its passes, where others may follow in its window
    goes_on: frozenset[str] = frozenset()  # generators that nobody drew from between the batch before and this one
    versions: tuple[int, ...] = ()  # PyTorch's counts of writes to the tensors of the batch


class Transaction:
    """Runs the updates of one model."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        ranks: TrainingRanks,
        *,
        scaler: Any = None,
        clip: Callable[[torch.nn.Module], object] = lambda model: None,
        after_update: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.ranks = ranks
        self.scaler = scaler
        self.extra_bytes = 0  # memory that the last snapshot took
        self._clip = clip
        self._after_update = after_update
        self._snapshot = WindowSnapshot(model)
        self._update = Update(optimizer)
        self.retrying = self._update.retrying  # entered around what changes gradients in place, such as clipping
        self._fitted: Fitted | None = None
        self._window_length = 1
        self.entries: list[WindowBatch] = []  # the batches of the window that is open; empty when none is
        self.is_stale = False  # whether the gradients of the window are gone, so that all its batches must be run again
        self.last_run: WindowBatch | None = None  # the batch whose passes were run last, whether they went well or not
        self.kept: list[Any] = []
        """What else passes change: has `remember`, called when a window begins, and `restore` for a roll back."""

    @property
    def is_due(self) -> bool:
        """Whether the window has all its batches."""
        return len(self.entries) >= self._window_length

    def close(self) -> None:
        """Leaves model and optimizer without any settings."""
        if self._fitted is not None:
            self._fitted.close()
            self._fitted = None
            self._update.optimizer = self.optimizer

    # The window.

    def open(self, length: int) -> None:
        """A window of so many batches begins."""
        self._window_length, self.is_stale = length, False
        self.entries.clear()
        self.ranks.begin()
        self._clear_gradients()
        if caught(self._snapshot.begin) is not None:
            # Nothing has happened yet; what is left over from before goes first.
            oom.release()
            self._snapshot.begin()
        for kept in self.kept:
            kept.remember()
        self.extra_bytes = self._snapshot.size_bytes

    def add(self, loss: Loss, batch: Any, passes: Passes | None = None) -> WindowBatch:
        """One more batch; it has yet to be run."""
        if passes is None:
            self._snapshot.include(value for value in held_by(loss) if isinstance(value, torch.nn.Module))
            self.extra_bytes = self._snapshot.size_bytes
        entry = WindowBatch(loss, batch, RandomState.now(), passes, versions=_versions(batch))
        before = self.entries[-1].ended if self.entries else None
        if before is not None:
            entry.goes_on = entry.random_state.unchanged_since(before)
        self.entries.append(entry)
        return entry

    def run(self, settings_of: Callable[[Any], Settings], *, again: bool) -> MemoryFailure | None:
        """Runs the last batch of the window, or all of them `again`; what ran out, on this or another process.

        Raises:
            CannotFit: a batch that must be run again was changed in place.
        """
        failure: MemoryFailure | None = None
        again = again or self.is_stale
        for entry in self.entries if again else self.entries[-1:]:
            if again:
                if _versions(entry.batch) != entry.versions:
                    raise CannotFit(_CHANGED_BATCH)
                entry.random_state.restore(but=entry.goes_on)
            settings = settings_of(entry.batch)
            self.last_run = entry
            failure = self._voted(caught(partial(self._run, entry, settings)))
            if failure is not None:
                break
            if self._window_length > 1:
                entry.ended = RandomState.now()
        self.is_stale = failure is not None
        return failure

    def finish(self) -> MemoryFailure | None:
        """Makes the gradients those of the window and prepares the update; what ran out, on this or another process."""
        return self._voted(caught(self._prepare))

    def commit(self) -> bool | MemoryFailure:
        """Updates the parameters; False where the update was left out. Nothing can be undone afterwards.

        What ran out before anything had changed is returned: the window can be rolled back. Other processes may have
        made the update by then, so where there are any, it is raised.
        """
        happened = False

        def step() -> None:
            nonlocal happened
            happened = self._update.step(self.scaler)

        if self._weight() != 0:
            if self.ranks.num_ranks > 1:
                step()
            elif (failure := caught(step)) is not None:
                return failure
        if happened:
            with self._update.retrying():
                self._after_update()
        self._end()
        return happened

    def _end(self) -> None:
        """The window is over."""
        self._snapshot.forget()
        self.entries.clear()
        self.last_run = None

    def update_by(self, update: Callable[[], object]) -> MemoryFailure | None:
        """Has `update`, another library's, change the parameters; what ran out before anything had changed."""
        failure = caught(self._update.prepare)
        if failure is None:
            failure = caught(partial(self._update.step, run=update))
        if failure is None:
            self._end()
        return failure

    def roll_back(self) -> None:
        """Everything is as it was when the window began; its batches can be run again."""
        self._undo()
        self.entries[0].random_state.restore()
        if oom.where_of(self.model) is Where.HOST:
            heap.map_large_blocks(True)
        oom.release()

    def drop(self, entry: WindowBatch) -> None:
        """Takes the last batch out of the window, whose passes the user's code or the user has ended.

        What they have added to the gradients can't be told from the rest, so the other batches will be run again.
        Nothing happens where the window is over.
        """
        if not self.entries or self.entries[-1] is not entry:
            return
        self.entries.pop()
        self._undo()

    def differences(self, num_parts: int) -> str:
        """What differs from the step with the whole batch at once, or ""."""
        if num_parts == 1:
            return ""
        differences = []
        training = [module for module in self.model.modules() if module.training]
        if any(isinstance(module, internals.NormBase) for module in training):
            differences.append(
                "batch norm normalises each micro-batch by its own statistics (running statistics are the batch's)"
            )
        shares = (
            module.p if isinstance(module, internals.Dropout) else getattr(module, "dropout", 0.0)
            for module in training
        )
        if any(isinstance(share, float) and share > 0 for share in shares):
            differences.append("dropout draws other numbers than for the whole batch")
        counted = self._snapshot.changed()
        if counted:
            others = f" and {len(counted) - 1} more" if len(counted) > 1 else ""
            differences.append(f"the forward pass changes {counted[0]!r}{others} once per micro-batch")
        return "; ".join(differences)

    # Parts.

    def _voted(self, failure: MemoryFailure | None) -> MemoryFailure | None:
        if self.ranks.any(failure is not None) and failure is None:
            return MemoryFailure(oom.where_of(self.model), "another rank", text="another process ran out of memory")
        return failure

    def _run(self, entry: WindowBatch, settings: Settings) -> None:
        passes = _PassesOfBatch(entry, self.refit(settings), self.scaler, self.ranks, self._window_length)
        with passes.statistics or nullcontext():
            self.ranks.run(entry.num_parts, passes.run_part, passes.smallest)
        passes.end()

    def refit(self, settings: Settings) -> Fitted:
        """The model as these settings run it; put on anew only where more than the number of parts has changed."""

        def moves(settings: Settings) -> Settings:
            return replace(settings, micro_batches=1, micro_batch_size=0)

        if self._fitted is not None and moves(self._fitted.settings) == moves(settings):
            self._fitted.settings = settings
            return self._fitted
        self.close()
        self._fitted = Fitted(settings, self.model, self.optimizer)
        self._update.optimizer = self._fitted.optimizer
        return self._fitted

    def _weight(self) -> float | None:
        """What the gradients of the window must be divided by; None: nothing; 0: nothing counted at all."""
        weights = [entry.weight for entry in self.entries]
        return None if None in weights else sum(weight for weight in weights if weight is not None)

    def _prepare(self) -> None:
        weight = self._weight()
        self.ranks.reduce_gradients()
        if any(entry.passes is not None for entry in self.entries):
            # A library has weighed the batches of each process; what is left is the mean over processes.
            if self.ranks.num_ranks > 1:
                self._scale_gradients(1 / self.ranks.num_ranks)
            return
        if weight is not None and self.ranks.num_ranks > 1:
            weight = self.ranks.total(weight)
            self.entries[0].weight = weight
            for entry in self.entries[1:]:
                entry.weight = 0.0
        if weight == 0:
            return
        if self.scaler is not None:
            self.scaler.unscale_(self._update.optimizer)
        if weight not in (None, 1.0):
            self._scale_gradients(1 / weight)
        self._clip(self.model)
        self._update.prepare()

    def _undo(self) -> None:
        """Gradients, scaler and buffers are as they were when the window began."""
        self.is_stale = True
        self._clear_gradients()
        if self.scaler is not None:
            internals.reset_scaler(self.scaler, self._update.optimizer)
        self._snapshot.restore()
        for kept in self.kept:
            kept.restore()

    def _scale_gradients(self, factor: float) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)


def _versions(batch: Any) -> tuple[int, ...]:
    return tuple(internals.version_of(tensor) for tensor in tensors_in(batch))


class _PassesOfBatch:
    """Passes of the parts of a batch; afterwards gradients are those of its loss, times the weight of its entry."""

    def __init__(
        self, entry: WindowBatch, fitted: Fitted, scaler: Any, ranks: TrainingRanks, window_length: int
    ) -> None:
        self._entry = entry
        self._fitted = fitted
        self._scaler = scaler
        self._ranks = ranks
        entry.num_parts = fitted.num_parts(entry.batch)
        self._parts = split(entry.batch, entry.num_parts)
        # The only batch of a process on its own is weighed on the way, as a plain loop does it, and so is one whose
        # weight in its window is another library's business. Among others one counts by its samples, in however many
        # parts it is run.
        self._is_alone = (window_length == 1 and ranks.num_ranks == 1) or entry.passes is not None
        self._is_weighed = self._is_alone
        unit = 1.0 if self._is_alone else float(common_first_dimension(entry.batch) or 1)
        weighting = fitted.settings.weighting
        weights = raw_weights(self._parts, weighting)
        self._is_sum = weighting.kind == "sum"
        whole = 1.0 if self._is_sum else sum(weights)
        self._factors = [unit * weight / whole for weight in weights]
        self._weight = 0.0
        self._total: torch.Tensor | None = None
        self.statistics = PooledStatistics(fitted.model) if entry.num_parts > 1 else None

    def run_part(self, index: int) -> None:
        """The passes of one part."""
        part, self._parts[index] = self._parts[index], None
        if self.statistics is not None:
            self.statistics.part()
        factor = self._factors[index]
        if self._entry.passes is not None:
            self._weight += factor
            if factor or self._ranks.num_ranks > 1:
                value = self._entry.passes(part, factor)
                if factor:
                    self._add(value, factor)
            return
        value, weight = self._fitted.forward(self._entry.loss, part)
        del part
        if weight is not None:
            self._is_weighed = self._is_alone and self._entry.num_parts == 1
            factor = 1.0 if self._is_weighed and weight else weight
        self._weight += factor / self._entry.num_parts if self._is_sum and weight is None else factor
        if not factor and self._ranks.num_ranks == 1:
            # A mean over nothing is no number, and must not spoil the others.
            return
        self._backward(value, factor)
        self._add(value, factor)

    def _add(self, value: torch.Tensor, factor: float) -> None:
        # A loss can be a view of something large.
        held = value.detach().clone() if factor == 1.0 else value.detach() * factor
        self._total = held if self._total is None else self._total + held

    def smallest(self) -> None:
        """Passes of one sample, whose gradients are zero."""
        part = part_of(self._entry.batch, 0, 1)
        if self._entry.passes is not None:
            self._entry.passes(part, 0.0)
        else:
            self._backward(self._fitted.forward(self._entry.loss, part)[0], 0.0)

    def _backward(self, value: torch.Tensor, factor: float) -> None:
        value = value * factor if factor != 1.0 else value
        if not factor:
            value = value.nan_to_num()
        (value if self._scaler is None else self._scaler.scale(value)).backward()

    def end(self) -> None:
        """All went well."""
        entry = self._entry
        entry.weight = None if self._is_weighed and self._weight else self._weight
        entry.value = self._total / entry.weight if self._total is not None and entry.weight else self._total


class PooledStatistics:
    """The norms of a model; entered around the passes of all parts of one batch."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers = [
            _Layer(part)
            for part in model.modules()
            if isinstance(part, internals.NormBase) and part.training and part.running_mean is not None
        ]

    def part(self) -> None:
        """Another part begins."""
        for layer in self._layers:
            layer.call = 0

    def __enter__(self) -> "PooledStatistics":
        for layer in self._layers:
            layer.begin()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for layer in self._layers:
            layer.end(keep=kind is None)


class _Layer:
    """One norm: what its calls have seen, by their order within a forward pass."""

    def __init__(self, norm: internals.NormBase) -> None:
        self._norm = norm
        self.call = 0
        self._seen: defaultdict[int, list[tuple[int, torch.Tensor, torch.Tensor]]] = defaultdict(list)

    def begin(self) -> None:
        norm, buffers = self._norm, internals.buffers_of(self._norm)
        self._own = {name: buffers[name] for name in ("running_mean", "running_var", "num_batches_tracked")}
        self._momentum = norm.momentum
        buffers.update({name: None if b is None else torch.zeros_like(b) for name, b in self._own.items()})
        self._scratch: Any = norm.running_mean
        # With this, what is left in the buffers after a call is the statistics of that call.
        norm.momentum = 1.0
        self._hook = norm.register_forward_hook(self._note)

    def _note(self, norm: Any, inputs: Any, output: Any) -> None:
        # A recomputation has copies of the buffers, and has been seen before.
        if norm.running_mean is not self._scratch or not norm.training:
            return
        tensor = next(iter(tensors_in(inputs)))
        count = tensor.numel() // max(1, norm.num_features)
        self._seen[self.call].append((count, norm.running_mean.clone(), norm.running_var.clone()))
        self.call += 1

    def end(self, *, keep: bool) -> None:
        norm = self._norm
        self._hook.remove()
        norm.momentum = self._momentum
        internals.buffers_of(norm).update(self._own)
        if not keep:
            return
        tracked = self._own["num_batches_tracked"]
        with torch.no_grad():
            for number in sorted(self._seen):
                if tracked is not None:
                    tracked.add_(1)
                self._update(*_pooled(self._seen[number], each=isinstance(norm, internals.InstanceNorm)))

    def _update(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        norm, tracked = self._norm, self._own["num_batches_tracked"]
        factor = norm.momentum
        if factor is None:
            # A plain average over all batches.
            factor = 1.0 / float(tracked) if tracked is not None else 0.0
        for name, value in (("running_mean", mean), ("running_var", variance)):
            held = self._own[name]
            assert held is not None
            held.mul_(1 - factor).add_(value.to(held.dtype), alpha=factor)


def _pooled(seen: list[tuple[int, torch.Tensor, torch.Tensor]], *, each: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, variance) of all elements from those of the parts; `each`: averages of statistics of single samples."""
    whole = sum(count for count, _, _ in seen)
    zero = torch.zeros((), dtype=torch.double)
    mean = sum((part.double() * (count / whole) for count, part, _ in seen), start=zero)
    if each:
        return mean, sum((variance.double() * (count / whole) for count, _, variance in seen), start=zero)
    squares = sum(
        (variance.double() * (count - 1) + (part.double() - mean).square() * count for count, part, variance in seen),
        start=zero,
    )
    return mean, squares / max(1, whole - 1)

"""The objects of one PyTorch training loop, as its guard handles them."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from memfit.core.adapter import GuardedLoop
from memfit.core.device import Origin
from memfit.core.errors import BadBatch, BadInput, BadModel, BadOptimizer
from memfit.core.guarding import (
    BatchSize,
    Blame,
    BrokenUpdate,
    Fallbacks,
    GuardOptions,
    MemoryFailure,
    Splitting,
    Where,
)
from memfit.core.oom import caught, recognise
from memfit.core.own_memory import limits, read_sizes
from memfit.core.plan import Plan
from memfit.core.settings import Settings, Weighting
from memfit.core.units import format_size
from memfit.frameworks.torch import internals, oom
from memfit.frameworks.torch.apply.fitted import check_unfitted
from memfit.frameworks.torch.apply.loss_function import as_loss
from memfit.frameworks.torch.apply.micro_batches import places, split
from memfit.frameworks.torch.guard import state as run_state
from memfit.frameworks.torch.guard.batches import Batches
from memfit.frameworks.torch.guard.library_steps import unwrapped
from memfit.frameworks.torch.guard.parameters import device_of, storage_bytes
from memfit.frameworks.torch.guard.ranks import TrainingRanks, ranks_of
from memfit.frameworks.torch.guard.transaction import Loss, Passes, Transaction, WindowBatch
from memfit.frameworks.torch.shapes.batch import common_first_dimension, may_be_samples
from memfit.frameworks.torch.shapes.stand_in import tensors_in
from memfit.frameworks.torch.trace import loss_probe as probe

_log = logging.getLogger("memfit")

# What batch norms of PyTorch say to a single value.
_OF_ONE_SAMPLE = "Expected more than 1 value per channel"
_INTERRUPTED = (
    "an update was interrupted by {0.__name__}, so that parameters may be between two steps. Resume from the last "
    "checkpoint."
)


class TorchLoop(GuardedLoop):
    """Model, optimizer and what goes with them; `commits`: whether the loop makes its updates, and no library does."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        scheduler: Any = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        settings: Settings | None = None,
        options: GuardOptions | None = None,
        finish_window: Callable[[], None] = lambda: None,
        commits: bool = True,
    ) -> None:
        options = options or GuardOptions()
        optimizer, scaler = unwrapped(optimizer, options.scaler)
        _check(model, optimizer)
        self._settings = settings or Settings()
        if scaler is None and self._settings.precision == "amp-fp16":
            # A plan runs the passes in float16, whose gradients need a scaler.
            scaler = torch.amp.GradScaler("cuda" if oom.where_of(model) is Where.DEVICE else "cpu")
        self.model = model
        self.optimizer = self.owner = optimizer
        self.model_name = type(model).__name__
        self._scheduler = scheduler
        self._options = options
        self._accumulate = accumulate
        self._clip_norm = clip_norm
        self._commits = commits
        self._draws = False  # whether the loss draws numbers that no part of a batch gets again
        self.ranks: TrainingRanks = ranks_of(model)
        self.transaction = Transaction(
            model, optimizer, self.ranks, scaler=scaler, clip=self._clip, after_update=self._after_update
        )
        self.batches = Batches(finish_window, _log.warning)
        self._parts = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "scaler": scaler,
            "ema": options.ema,
        }
        self._extra = options.state or {}
        self.assumed_weighting = Weighting()  # how the losses of micro-batches add up where that can't be tried out
        self.is_due = False  # whether an update follows the passes
        self._has_passed = False

    # One step.

    @contextmanager
    def window(self, loss: Loss, batch: Any, passes: Passes | None = None) -> Iterator[WindowBatch]:
        """Takes a batch into the window, a new one where none is open; one that ends in an exception is dropped."""
        transaction = self.transaction
        if not transaction.entries:
            transaction.open(self._accumulate)
        entry = transaction.add(loss, batch, passes)
        self.is_due, self._has_passed = transaction.is_due, False
        try:
            yield entry
        except BaseException:
            # It must not count in a later update.
            if not self.broken:
                try:
                    transaction.drop(entry)
                except BrokenUpdate as error:
                    self.broken = str(error)
            raise

    def end_window(self) -> None:
        """The next attempt makes an update of the batches so far, whose passes have been run."""
        self.is_due, self._has_passed = True, not self.transaction.is_stale

    def attempt(self, settings_of: Callable[[Any], Settings], *, again: bool) -> MemoryFailure | None:
        """Passes of the last batch, or of the whole window again, and the update where it is due."""
        self.in_update, self.happened = False, None
        failure = None
        if again or not self._has_passed:
            failure = self.transaction.run(settings_of, again=again)
        if failure is None and self.is_due:
            self.in_update = True
            failure = self.transaction.finish()
            if failure is None and self._commits:
                failure = self._commit()
        return failure

    def _commit(self) -> MemoryFailure | None:
        """The update, and what goes with it; what ran out before anything had changed."""
        outcome: MemoryFailure | bool | None = None
        try:
            outcome = self.transaction.commit()
            if outcome is True and self._scheduler is not None:
                self._scheduler.step()
        except BaseException as error:
            if self.transaction.entries or outcome is True:
                # The update was under way, or made without its scheduler.
                self.broken = str(error) if isinstance(error, BrokenUpdate) else _INTERRUPTED.format(type(error))
                if not isinstance(error, BrokenUpdate) and recognise(error) is not None:
                    raise BrokenUpdate(self.broken) from error
            raise
        if isinstance(outcome, MemoryFailure):
            return outcome
        self.happened = outcome
        return None

    def _clip(self, model: torch.nn.Module) -> None:
        if self._options.clip is not None:
            self._options.clip(model)
        if self._clip_norm is not None:
            self.ranks.clip_norm(list(model.parameters()), self._clip_norm)
        if self._options.clip_value is not None:
            torch.nn.utils.clip_grad_value_(model.parameters(), self._options.clip_value)

    def _after_update(self) -> None:
        if self._options.ema is not None:
            self._options.ema.update_parameters(self.plain_model)

    def roll_back(self) -> None:
        """Everything is as it was when the window began."""
        self.transaction.roll_back()

    @property
    def batch(self) -> Any:
        """The last batch, or, in a replay, another one of the window that was run last."""
        entry = self.transaction.last_run
        return (self.transaction.entries[-1] if entry is None or self.in_update else entry).batch

    def blame(self, error: Exception, *, again: bool) -> Blame | None:
        """Moves that were put on after a failure, or micro-batches of one sample, which no batch norm can normalise."""
        if isinstance(error, BadInput):
            return Blame.MOVES if again else None
        is_split = any(entry.num_parts > 1 for entry in self.transaction.entries)
        return Blame.SINGLE_SAMPLES if is_split and _OF_ONE_SAMPLE in str(error) else None

    # What the guard asks.

    @property
    def plain_model(self) -> torch.nn.Module:
        """The model without what wraps it for several processes."""
        is_wrapped = isinstance(self.model, torch.nn.parallel.DistributedDataParallel)
        plain: torch.nn.Module = self.model.module if is_wrapped else self.model
        return plain

    def fallbacks(self) -> Fallbacks:
        """Recomputation of the blocks, and on devices offloading of what they keep."""
        mixes = any(isinstance(module, internals.NormBase) and module.training for module in self.model.modules())
        moves: list[dict[str, Any]] = []
        offloaded = tuple(f"{path}." for path in self._settings.offload)
        paths = tuple(path for path in blocks(self.model) if not f"{path}.".startswith(offloaded))
        if paths and not set(paths) <= set(self._settings.checkpoint):
            # The compiler decides by itself what is kept.
            moves.append({"checkpoint": paths, "compile": False})
            if oom.where_of(self.model) is Where.DEVICE:
                moves.append({"checkpoint": paths, "compile": False, "offload": paths})
        return Fallbacks(
            stronger=tuple(moves),
            whole_first=mixes,
            grow_after=self._options.grow_after,
            # A norm that is given one sample fails on one process only, and the others would wait for it.
            least_samples=2 if mixes and self.ranks.num_ranks > 1 else 1,
        )

    def size_of(self, batch: Any) -> BatchSize:
        """Samples and elements of a batch."""
        num_samples = common_first_dimension(batch)
        elements = sum(tensor.numel() for tensor in tensors_in(batch))
        return BatchSize(num_samples or None, max(1.0, elements / max(1, num_samples or 1)))

    def identity(self, batch: Any, host_bytes: int | None) -> list[object]:
        """Everything that a finding about memory depends on: model, optimizer, shapes of one sample, device, memory."""
        device = device_of(self.model)
        name, memory = "cpu", min(filter(None, (data_limit_bytes(), host_bytes)), default=None)
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            name, memory = properties.name, properties.total_memory
        return [
            *((path, tuple(p.shape), p.dtype, p.requires_grad) for path, p in self.model.named_parameters()),
            type(self.optimizer).__qualname__,
            *((place, tuple(tensor.shape[1:]), tensor.dtype) for place, tensor in places(batch)),
            *(device.type, name, memory, self.ranks.num_ranks, self._accumulate),
        ]

    def room_bytes(self, host_bytes: int | None, budget_bytes: int | None) -> int | None:
        """The budget, or what model, gradients, optimizer state, activations and batch may take together here."""
        if self.ranks.num_ranks > 1:
            return None  # processes that plan for themselves may come to different plans
        if budget_bytes:
            return budget_bytes
        device = device_of(self.model)
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            return int(free + torch.cuda.memory_reserved(device))
        known = [size for size in (data_limit_bytes(), host_bytes) if size is not None]
        sizes = read_sizes()
        if not known or sizes is None:
            return None
        # Private writable memory of this process, as RLIMIT_DATA counts it.
        return max(0, min(known) - sizes[-1] + self.held_bytes)

    @property
    def held_bytes(self) -> int:
        """What parameters, gradients, buffers and the optimizer's state take now."""
        gradients = (parameter.grad for parameter in self.model.parameters() if parameter.grad is not None)
        kept = getattr(self.optimizer, "state", {}).values()
        states = (value for state in kept for value in state.values())
        tensors = (value for value in states if isinstance(value, torch.Tensor))
        return storage_bytes((*self.model.parameters(), *gradients, *self.model.buffers(), *tensors))

    def plan(self, make_plan: Callable[..., Plan], budget_bytes: int) -> Settings:
        """The planner's settings for the last batch."""
        self.transaction.close()
        entry = self.transaction.entries[-1]
        return make_plan(
            self.plain_model,
            entry.loss,
            entry.batch,
            optimizer=self.optimizer,
            device="cuda" if oom.where_of(self.model) is Where.DEVICE else "cpu",
            budget=budget_bytes,
            # Nothing that an update inside of the backward pass changes could be undone.
            allow=["-step-in-backward"],
        ).settings

    def why_not_split(self) -> str:
        """Which tensor keeps the last batch from being split."""
        try:
            split(self.transaction.entries[-1].batch, 2)
        except BadBatch as error:
            return str(error)
        return "the batch holds a single sample"

    def splitting(self) -> Splitting:
        """How the losses of micro-batches add up, tried out with the last batch, or else assumed."""
        entry = self.transaction.entries[-1]
        weighting, reason = self.find_weighting(entry.loss, entry.batch)
        if weighting is None and not self._options.approximate:
            return Splitting(Weighting(), refused=reason)
        remark = f"micro-batches are approximate here: {reason}" if weighting is None or self._draws else ""
        return Splitting(weighting or Weighting(), remark=remark)

    def find_weighting(self, loss: Loss, batch: Any) -> tuple[Weighting | None, str]:
        """(how the losses of micro-batches add up, why they don't); an assumption where it can't be tried out."""
        if self.ranks.communicates:
            if may_be_samples(batch):
                return None, probe.UNKNOWN_LISTS
            # How many passes it takes to find out depends on the batch and on time, and all would have to run as many.
            return self.assumed_weighting, "the passes of a sharded model can't be tried out by one process"
        weighting, reason = self._probed_weighting(loss, batch)
        if self.ranks.num_ranks == 1:
            return weighting, reason
        # Other batches may say something else; all processes go by what the first one has found.
        shared = json.loads(self.ranks.share(json.dumps([None if weighting is None else asdict(weighting), reason])))
        return None if shared[0] is None else Weighting(**shared[0]), shared[1]

    def _probed_weighting(self, loss: Loss, batch: Any) -> tuple[Weighting | None, str]:
        # What was left over from the failed step may have been in the way.
        plain_loss = as_loss(loss)
        for max_samples in (probe.MAX_SAMPLES, probe.MAX_SAMPLES, 2):
            results: list[probe.Found] = []

            def run(max_samples: int = max_samples, results: list[probe.Found] = results) -> None:
                self.transaction.close()
                results.append(probe.find_weighting(self.plain_model, plain_loss, batch, max_samples))

            if caught(run) is None and not results[0].ran_out:
                self._draws = results[0].is_random
                is_assumed = results[0].origin is Origin.ASSUMED and results[0].weighting is not None
                return self.assumed_weighting if is_assumed else results[0].weighting, results[0].reason
            oom.release()
        if may_be_samples(batch):
            return None, probe.UNKNOWN_LISTS
        return self.assumed_weighting, "there is no memory to try it out"

    def differences(self, settings: Settings) -> str:
        """What parts of a batch compute in another way than the whole."""
        return self.transaction.differences(settings.micro_batches)

    def explain(self, failure: MemoryFailure, settings: Settings, why_whole: str) -> str:
        """What was tried, what would be needed, what to do."""
        parameters = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        size = f" for {format_size(failure.requested_bytes)}" if failure.requested_bytes else ""
        tried = f"micro-batches of {settings.micro_batch_size}" if settings.micro_batch_size else "whole batches"
        if settings.checkpoint:
            tried += f" with {len(settings.checkpoint)} modules recomputed"
        limit = data_limit_bytes() if failure.where == "host" else None
        lines = [
            f"memory ran out on the {failure.where}{size}, and nothing is left to try after {tried}.",
            f"  parameters, buffers and optimizer state   {format_size(self.held_bytes)}",
            f"  gradients                                 {format_size(parameters)}",
        ]
        if not self.optimizer.state:
            lines.append("  optimizer state, which the first update adds, and activations come on top")
        if limit is not None:
            lines.append(f"  limit of this process                     {format_size(limit)}")
        if why_whole:
            lines.append(f"The batch was not split: {why_whole}")
        lines.append(
            "Use a smaller model or sample, an optimizer with less state (memfit.plan with allow='changes training' "
            "finds what would fit), or a machine with more memory."
        )
        return "\n".join(lines)

    # Checkpoints.

    def mark(self) -> Any:
        """The position in the data and the parameters as they are now, to compare with later ones."""
        versions = [-1 if p.is_inference() else internals.version_of(p) for p in self.model.parameters()]
        return self.batches.epoch, self.batches.batch, versions

    def is_at(self, mark: Any) -> bool:
        """Whether no batch was given out and no parameter was changed since then; epochs may have ended."""
        epoch, batch, versions = self.mark()
        is_same = (epoch, batch) == mark[:2] or (epoch > mark[0] and batch == 0)
        return bool(is_same and versions == mark[2] and not self.transaction.entries)

    @property
    def is_connected(self) -> bool:
        """Whether the processes can still talk to each other."""
        return torch.distributed.is_available() and torch.distributed.is_initialized()

    def write_state(self, directory: Path, progress: dict[str, Any]) -> None:
        """Writes everything that a resume needs into a directory, together with the other processes."""
        extra = {name: value.state_dict() for name, value in self._extra.items()}
        progress = {**progress, "batches": self.batches.state(), "extra": extra}
        run_state.save(directory, **self._parts, progress=progress)

    def read_state(self, directory: Path, check: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Takes over what `write_state` wrote, once `check` has not refused its progress, which is returned."""

        def checked(progress: dict[str, Any]) -> None:
            self.batches.check(progress.get("batches"))
            check(progress)

        progress: dict[str, Any] = run_state.load(directory, **self._parts, extra=self._extra, check=checked)
        self.batches.load(progress["batches"])
        return progress

    def resumed(self, directory: Path) -> Sequence[str]:
        """Where the run goes on."""
        return [f"resumed from {directory}"]

    def kept_parameters(self) -> Any:
        """What `guard.best` keeps of the model."""
        return run_state.Parameters(self.plain_model)

    def close(self) -> None:
        """Takes all settings off the model."""
        self.transaction.close()


def data_limit_bytes() -> int | None:
    """The soft limit of this process's data segment, RLIMIT_DATA or the address space's; None where there is none."""
    return min((limit for limit in limits() if limit is not None), default=None)


def _check(model: Any, optimizer: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise BadModel(f"a guard needs an nn.Module, but {type(model).__name__} was given.")
    check_unfitted(model)
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
        raise BadOptimizer(f"a guard needs the optimizer of the model, but {type(optimizer).__name__} was given.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise BadOptimizer(
            "LBFGS computes the loss several times in one update, which can't be undone as a whole. Use another "
            "optimizer with a guard, such as torch.optim.AdamW."
        )
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise BadOptimizer(
            "the optimizer has none of the model's parameters. Make it from model.parameters(), after the model was "
            "moved or wrapped."
        )


def blocks(model: torch.nn.Module) -> tuple[str, ...]:
    """Paths of the model's repeated blocks, or else of its large parts; none inside of another.

    A list or sequence of several modules that have parts of their own is what models repeat: layers of a transformer,
    blocks of the stages of a convolutional network.
    """
    paths = _repeated(model, "") or [path for path, _ in _with_parts(model, "")]
    return tuple(paths) if len(paths) > 1 else ()


def _repeated(module: torch.nn.Module, prefix: str) -> list[str]:
    """Paths of the repeated blocks inside of a module."""
    parts = _with_parts(module, prefix)
    if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential) and len(parts) > 1:
        return [inner for path, child in parts for inner in (_repeated(child, f"{path}.") or [path])]
    return [inner for path, child in parts for inner in _repeated(child, f"{path}.")]


def _with_parts(module: torch.nn.Module, prefix: str) -> list[tuple[str, torch.nn.Module]]:
    """The children that are trained and have children of their own."""
    return [
        (f"{prefix}{name}", child)
        for name, child in module.named_children()
        if next(child.children(), None) is not None and any(p.requires_grad for p in child.parameters())
    ]

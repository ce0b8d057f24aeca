"""The objects of one PyTorch training loop, as its guard handles them."""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from memfit.adapters.torch import oom
from memfit.adapters.torch.fitting import probe
from memfit.adapters.torch.fitting.fitted import check_unfitted
from memfit.adapters.torch.fitting.micro_batches import split
from memfit.adapters.torch.fitting.probe import part_of
from memfit.adapters.torch.guarding import room, sharded_state
from memfit.adapters.torch.guarding.accelerate_loop import unwrapped
from memfit.adapters.torch.guarding.batches import Batches
from memfit.adapters.torch.guarding.blocks import blocks
from memfit.adapters.torch.guarding.ranks import ranks_of
from memfit.adapters.torch.guarding.transaction import Clipping, Transaction
from memfit.adapters.torch.job import may_be_samples
from memfit.adapters.torch.loss_function import as_loss
from memfit.core.device import Origin
from memfit.core.errors import BadBatch, BadModel, BadOptimizer
from memfit.core.guarding import BatchSize, OutOfMemory
from memfit.core.settings import Settings, Weighting
from memfit.core.units import format_size

_log = logging.getLogger("memfit")


class TorchLoop:
    """Model, optimizer and what goes with them; arguments are those of `memfit.Guard`.

    Args:
        model: the module.
        optimizer: over its parameters.
        scheduler: stepped after every real update.
        scaler: a gradient scaler.
        ema: a moving average of the parameters.
        clip_norm: greatest norm of the gradients.
        clip_value: greatest value of an element.
        clip: called with the model instead.
        state: further objects that checkpoints hold.
        finish_window: called at the end of an epoch.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        scheduler: Any,
        scaler: Any,
        ema: Any,
        clip_norm: float | None,
        clip_value: float | None,
        clip: Callable[[Any], Any] | None,
        state: dict[str, Any],
        finish_window: Callable[[], None],
    ) -> None:
        optimizer, scaler = unwrapped(optimizer, scaler)
        _check(model, optimizer)
        self.model = model
        self.optimizer = optimizer
        self._scheduler = scheduler
        self._ema = ema
        self.ranks = ranks_of(model)
        self.is_first = self.ranks.is_first
        self.transaction = Transaction(
            model,
            optimizer,
            self.ranks,
            scaler=scaler,
            clipping=Clipping(clip_norm, clip_value, clip),
            after_update=self._after_update,
        )
        self.batches = Batches(finish_window, _log.warning)
        self._parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "ema": ema}
        self._extra = state
        self.assumed_weighting = Weighting()
        """How the losses of micro-batches add up where that can't be tried out."""

    # What the guard asks.

    @property
    def plain_model(self) -> torch.nn.Module:
        """The model without what wraps it for several processes."""
        is_wrapped = isinstance(self.model, torch.nn.parallel.DistributedDataParallel)
        plain: torch.nn.Module = self.model.module if is_wrapped else self.model
        return plain

    @property
    def mixes_samples_in_norms(self) -> bool:
        """Whether batch norms let the samples of a batch see each other."""
        return any(isinstance(module, _NormBase) and module.training for module in self.model.modules())

    def need_scaler(self) -> None:
        """A plan runs the passes in float16: gradients need a scaler, a new one where the user has none."""
        if self.transaction.scaler is None:
            scaler = torch.amp.GradScaler("cuda" if oom.where_of(self.model) == "device" else "cpu")
            self.transaction.scaler = self._parts["scaler"] = scaler

    def stronger_moves(self, first: Settings) -> list[dict[str, Any]]:
        """Settings that need less memory than micro-batches alone, weakest first."""
        paths = tuple(path for path in blocks(self.model) if not _is_inside(path, first.offload))
        if not paths or set(paths) <= set(first.checkpoint):
            return []
        moves: list[dict[str, Any]] = [{"checkpoint": paths}]
        if oom.where_of(self.model) == "device":
            moves.append({"checkpoint": paths, "offload": paths})
        return moves

    def size_of(self, batch: Any) -> BatchSize:
        """Samples and elements of a batch."""
        return room.size_of(batch)

    def identity(self, batch: Any, host_bytes: int | None) -> list[object]:
        """Everything that a finding about memory depends on."""
        return [*room.identity(self.model, self.optimizer, batch, host_bytes), self.ranks.num_ranks]

    def room_bytes(self, host_bytes: int | None) -> int | None:
        """What the step's tensors may take."""
        return room.room_bytes(self.model, self.optimizer, host_bytes)

    def device_name(self) -> str:
        """The device of the model, as the planner names it."""
        return "cuda" if oom.where_of(self.model) == "device" else "cpu"

    def why_not_split(self, batch: Any) -> str:
        """Which tensor keeps a batch from being split."""
        try:
            split(batch, 2)
        except BadBatch as error:
            return str(error)
        return "the batch holds a single sample"

    def find_weighting(self, loss: Callable[[Any, Any], Any], batch: Any) -> tuple[Weighting | None, str]:
        """(how the losses of micro-batches add up, why they don't); an assumption where it can't be tried out."""
        if self.ranks.communicates:
            if may_be_samples(batch):
                return None, probe.UNKNOWN_LISTS
            # How many passes it takes to find out depends on the batch and on time, and all would have to run as many.
            return self.assumed_weighting, "the passes of a sharded model can't be tried out by one process"
        weighting, reason = self._found_weighting(loss, batch)
        if self.num_ranks == 1:
            return weighting, reason
        # Other batches may say something else; all processes go by what the first one has found.
        shared = json.loads(self.share(json.dumps([None if weighting is None else asdict(weighting), reason])))
        return None if shared[0] is None else Weighting(**shared[0]), shared[1]

    def _found_weighting(self, loss: Callable[[Any, Any], Any], batch: Any) -> tuple[Weighting | None, str]:
        # What was left over from the failed step may have been in the way.
        for tried in (batch, batch, part_of(batch, 0, 2)):
            found = self._probed(loss, tried)
            if found is not None:
                is_assumed = found.origin is Origin.ASSUMED and found.weighting is not None
                return self.assumed_weighting if is_assumed else found.weighting, found.reason
            oom.release()
        if may_be_samples(batch):
            return None, probe.UNKNOWN_LISTS
        return self.assumed_weighting, "there is no memory to try it out"

    def _probed(self, loss: Callable[[Any, Any], Any], batch: Any) -> probe.Found | None:
        """What a probe finds out; None where memory runs out in it."""
        ran_out = False

        def watched(model: Any, part: Any) -> Any:
            nonlocal ran_out
            try:
                return as_loss(loss)(model, part)
            except Exception as error:
                ran_out = ran_out or oom.recognise(error) is not None
                raise

        try:
            self.take_off_settings()
            found = probe.find_weighting(self.plain_model, watched, batch)
        except Exception as error:
            if oom.recognise(error) is None:
                raise
            oom.clear_frames(error)
            return None
        return None if ran_out else found

    def take_off_settings(self) -> None:
        """Leaves the model as the user made it, for a plan or a probe; the next pass puts settings on again."""
        self.transaction.close()

    def agreed_parts(self, num_parts: int) -> int:
        """The same number of micro-batches on all processes."""
        return num_parts if self.ranks.num_ranks == 1 else -self.ranks.agree([-num_parts])[0]

    def agreed(self, value: bool) -> bool:
        """What the first process says."""
        return value if self.ranks.num_ranks == 1 else bool(self.ranks.agree([int(value)])[0])

    def explain(self, failure: OutOfMemory, settings: Settings, why_whole: str) -> str:
        """What was tried, what would be needed, what to do."""
        held = room.held_bytes(self.model, self.optimizer)
        parameters = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        size = f" for {format_size(failure.requested_bytes)}" if failure.requested_bytes else ""
        tried = f"micro-batches of {settings.micro_batch_size}" if settings.micro_batch_size else "whole batches"
        if settings.checkpoint:
            tried += f" with {len(settings.checkpoint)} modules recomputed"
        limit = room.data_limit_bytes() if failure.where == "host" else None
        lines = [
            f"memory ran out on the {failure.where}{size}, and nothing is left to try after {tried}.",
            f"  parameters, buffers and optimizer state   {format_size(held)}",
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

    # What the guard does.

    def commit(self) -> bool | OutOfMemory:
        """The update, and what goes with it; False where it was left out, or what ran out before anything changed."""
        happened = self.transaction.commit()
        if happened is True and self._scheduler is not None:
            self._scheduler.step()
        return happened

    def _after_update(self) -> None:
        if self._ema is not None:
            self._ema.update_parameters(self.plain_model)

    # Checkpoints.

    def mark(self) -> Any:
        """The position in the data and the parameters as they are now, to compare with later ones."""
        versions = [-1 if p.is_inference() else p._version for p in self.model.parameters()]
        return self.batches.epoch, self.batches.batch, versions

    def is_at(self, mark: Any) -> bool:
        """Whether no batch was given out and no parameter was changed since then; epochs may have ended."""
        epoch, batch, versions = self.mark()
        is_same = (epoch, batch) == mark[:2] or (epoch > mark[0] and batch == 0)
        return bool(is_same and versions == mark[2])

    @property
    def num_ranks(self) -> int:
        """Processes that train the model together."""
        return self.ranks.num_ranks

    @property
    def is_connected(self) -> bool:
        """Whether the processes can still talk to each other."""
        return torch.distributed.is_available() and torch.distributed.is_initialized()

    def write_state(self, directory: Path, progress: dict[str, Any]) -> None:
        """Writes everything that a resume needs into a directory, together with the other processes."""
        extra = {name: value.state_dict() for name, value in self._extra.items()}
        progress = {**progress, "batches": self.batches.state(), "extra": extra}
        sharded_state.save(directory, **self._parts, progress=progress)

    def read_state(self, directory: Path, check: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Takes over what `write_state` wrote; returns the progress it was given.

        Args:
            directory: of the checkpoint.
            check: may refuse the progress, before anything is changed.
        """

        def checked(progress: dict[str, Any]) -> None:
            self.batches.check(progress.get("batches"))
            check(progress)

        progress: dict[str, Any] = sharded_state.load(directory, **self._parts, extra=self._extra, check=checked)
        self.batches.load(progress["batches"])
        return progress

    def kept_parameters(self) -> Any:
        """What `guard.best` keeps of the model."""
        from memfit.adapters.torch.guarding.state import Parameters

        return Parameters(self.plain_model)

    def share(self, text: str) -> str:
        """The text of the first process."""
        if self.num_ranks == 1:
            return text
        shared = [text]
        torch.distributed.broadcast_object_list(shared, src=0)
        return shared[0]

    def any(self, value: bool) -> bool:
        """Whether it is so on any process."""
        return self.ranks.vote(value)

    def close(self) -> None:
        """Takes all settings off the model."""
        self.transaction.close()


def _is_inside(path: str, paths: tuple[str, ...]) -> bool:
    return any(path == outer or path.startswith(f"{outer}.") for outer in paths)


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

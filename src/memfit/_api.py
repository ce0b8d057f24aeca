"""The public verbs, composed from the parts: trace, replay, report."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memfit._estimator import (
    Estimator,
    as_job,
    checked_batch_size,
    named_optimizer,
    require_keras,
    require_torch,
    resolve,
    torch_adapter,
)
from memfit._plan_target import autocast_of
from memfit.allocator import parse_options
from memfit.core import dryrun as dryrun_results
from memfit.core import env
from memfit.core import estimate as estimate_results
from memfit.core.device import Device, Kind
from memfit.core.dryrun import DryRun, Request
from memfit.core.errors import BadBatch, BadInput, StepFailed
from memfit.core.estimate import LACKS_PRECISION, Estimate, Note
from memfit.core.job import Job
from memfit.core.progress import announce, doing
from memfit.core.replay import AllocatorOptions
from memfit.core.shown import Shown
from memfit.core.units import format_size
from memfit.reports import batches, run_text, text

if TYPE_CHECKING:
    from memfit.runs.sequence import TooLarge

_LARGEST_BATCH = 2**24
# Of the usable memory: estimates were off by up to 2.1% of measured peaks (docs/results).
_SAFE_SHARE = 0.97
# Sizes so much smaller are looked at before one is called safe; all of the next where that takes no trace.
_FEW_NEIGHBOURS: Sequence[int] = (1, 2, 4, 8)
_NEIGHBOURS: Sequence[int] = range(1, 33)
# Trying out suggestions may take twice as long as the dry run did, or this long.
_MIN_TRIAL_SECONDS = 120.0
# What a device without bfloat16 does instead.
_IN_FLOAT16 = {"amp-bf16": "amp-fp16", "bf16": "fp16"}


def _write_page(result: Estimate, path: str) -> None:
    from memfit.reports import page

    page.write_page(result, path)


def _write_run_page(result: DryRun, path: str) -> None:
    from memfit.reports import page

    page.write_run_page(result, path)


estimate_results.reporters.use(text.format_estimate, _write_page)
dryrun_results.reporters.use(run_text.format_run, _write_run_page)


def estimate(
    model: Any,
    *arguments: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    batch: Any = None,
    optimizer: Any = None,
    device: str | Device | None = None,
    precision: str | None = None,
    mode: str | None = None,
    allocator: AllocatorOptions | None = None,
    batch_size: int | None = None,
) -> Estimate:
    """Peak memory of a training step on a device that need not be there.

    Args:
        model: an `nn.Module`, a callable that builds one (built without memory for its weights), a compiled
            `keras.Model`, a training step of JAX, or a `Job`.
        arguments: loss and batch by their place; what a step of JAX takes, arrays or shapes.
        loss: takes the model and a batch and returns the scalar loss; or a criterion such as `nn.CrossEntropyLoss()`,
            for a batch (x, y). None where the model returns its loss, and for Keras, which has it from `compile`.
        batch: any nesting of tensors, meta tensors included; (x, y) for Keras.
        optimizer: an instance, a callable that takes parameters, a name such as "adamw", or None.
        device: a name of the catalogue ("rtx-3090"), "cpu", a size ("24GiB"); None means this machine's own GPU.
        precision: "fp32", "fp16", "bf16", "amp-fp16", "amp-bf16", or None to leave the model as it is.
        mode: "training" (the default), or "inference" for a forward pass without gradients.
        allocator: settings of PyTorch's caching allocator.
        batch_size: replaces the first dimension of the batch.

    Returns:
        The peak, where it goes, and whether it fits.
    """
    job = as_job(model, arguments, loss, batch, optimizer=optimizer, precision=precision, mode=mode)
    size = None if batch_size is None else checked_batch_size(batch_size)
    target, options = resolve(device), allocator or AllocatorOptions()
    with doing("estimating"):
        result = Estimator(job, target, options, size).run()
        other = _IN_FLOAT16.get(job.precision or "")
        if other is None or not any(note.code == LACKS_PRECISION for note in result.notes):
            return result
        needed = format_size(Estimator(replace(job, precision=other), target, options, size).run().peak_bytes)
    remark = f"with precision {other} the step needs {needed} (simulated), with {job.precision} "
    return replace(result, notes=(*result.notes, Note(LACKS_PRECISION, remark + format_size(result.peak_bytes))))


@dataclass(frozen=True, slots=True, repr=False)
class MaxBatch(Shown):
    """The largest batch that is safe, and the largest that fits.

    A size is safe when it needs at most 97% of the usable memory with nothing that limits the allocator, and every size
    below it that was looked at fits: an allocator may place a smaller batch worse than a larger one. Estimates were off
    by up to 2.1% of measured peaks. Beyond that, a step fits only if everything is as estimated, or because the
    allocator gives back its cache.

    Args:
        batch_size: the largest that is safe; None when none is.
        estimate: the estimate at that batch size; at the limit when none is safe, and at the smallest one tried when
            nothing fits.
        tried: (batch size, bytes that the device must provide, fits) of every size looked at, in order. For those that
            don't fit it is what an unlimited device would provide.
        limit: the largest batch size that fits; None when not even the smallest does.
    """

    batch_size: int | None
    estimate: Estimate
    tried: tuple[tuple[int, int, bool], ...]
    limit: int | None = None

    def summary(self) -> str:
        """The answer, and what it takes."""
        needed, usable = format_size(self.estimate.peak_bytes), format_size(self.estimate.capacity_bytes)
        sizes = batches.sizes(self.batch_size, self.limit)
        return f"of {self.estimate.subject}: {sizes}, {needed} of {usable} on {self.estimate.device.name}"

    def __str__(self) -> str:
        return batches.format_batches(self.tried, self.batch_size, self.limit, self.estimate.device)


def max_batch(
    model: Any,
    *arguments: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    batch: Any = None,
    optimizer: Any = None,
    device: str | Device | None = None,
    precision: str | None = None,
    mode: str | None = None,
    allocator: AllocatorOptions | None = None,
    candidates: Iterable[int] | None = None,
) -> MaxBatch:
    """The largest batch that is safe, and the largest that fits, from a handful of traces.

    Args:
        model: as for `estimate`.
        arguments: as for `estimate`.
        loss: as for `estimate`.
        batch: a batch of any size; its first dimension is varied.
        optimizer: as for `estimate`.
        device: as for `estimate`; its capacity must be known.
        precision: as for `estimate`.
        mode: as for `estimate`.
        allocator: as for `estimate`.
        candidates: sizes to choose from; every whole number by default.
    """
    sizes = None if candidates is None else _checked_candidates(candidates)
    job = as_job(model, arguments, loss, batch, optimizer=optimizer, precision=precision, mode=mode)
    target = resolve(device)
    if target.usable_bytes is None:
        raise BadInput(f"the memory of {target.title} is unknown; name a size such as device='16GiB'.")
    with doing("looking for the largest batch"):
        estimator = Estimator(job, target, allocator or AllocatorOptions())
        start = estimator.run()
        if start.batch_size is None:
            raise BadBatch(
                "the batch's tensors share no first dimension, so it can't be made larger or smaller. "
                "Give tensors whose first dimension is the batch."
            )
        return _Search(start, _NEIGHBOURS if estimator.scales else _FEW_NEIGHBOURS).run(sizes)


def _checked_candidates(candidates: Iterable[int]) -> list[int]:
    given = list(candidates)
    message = f"candidates must be whole numbers from 1 up, such as [16, 32, 64], but {given} was given."
    if not given:
        raise BadInput(message)
    try:
        return sorted({checked_batch_size(size) for size in given})
    except BadBatch:
        raise BadInput(message) from None


def compare(
    jobs: Iterable[Job], *, device: str | Device | None = None, batch_size: int | None = None
) -> list[Estimate]:
    """Estimates of several jobs on one device, for a table side by side.

    Args:
        jobs: what to compare; the first is what the others are measured against.
        device: as for `estimate`.
        batch_size: the same for all; each job's own by default.
    """
    target = resolve(device)
    with doing("comparing"):
        return [estimate(job, device=target, batch_size=batch_size) for job in jobs]


def named_job(
    target: str, *, optimizer: str = "adamw", sequence_length: int | None = None, image_size: int | None = None
) -> Job:
    """The usual job of a named model: "timm:resnet50", "torchvision:vgg16", "keras:VGG16", "hf:GPT2LMHeadModel".

    Args:
        target: kind and name of the model.
        optimizer: "none", "sgd", "sgd-momentum", "adam", "adamw", "rmsprop", "adagrad", "adadelta" or "adafactor".
        sequence_length: tokens per sample, for language models.
        image_size: height and width, for vision models.
    """
    for option, value in (("sequence_length", sequence_length), ("image_size", image_size)):
        if value is not None and value < 1:
            raise BadInput(f"{option} must be at least 1, but {value} was given.")
    if target.startswith("keras:"):
        require_keras()
        from memfit.adapters.keras import named as keras_models

        return keras_models.named_job(target.removeprefix("keras:"), optimizer, image_size)
    # Fails early on a name that isn't one.
    named_optimizer(optimizer)
    from memfit.adapters.torch import named

    return named.named_job(target, optimizer, sequence_length, image_size)


def mend_torchvision() -> None:
    """Lets torchvision be imported beside a build of PyTorch that its compiled operators don't match."""
    torch_adapter()
    from memfit.adapters.torch.torchvision_operators import define_missing_operators

    define_missing_operators()


def dryrun(
    script: str | os.PathLike[str],
    arguments: Iterable[str] = (),
    *,
    device: str | Device | None = None,
    module: bool = False,
    count: int = 1,
    steps: int = 3,
    scan: int = 0,
    checkpoint_folder: str | os.PathLike[str] | None = None,
    writable: Iterable[str | os.PathLike[str]] = (),
    quiet_output: bool = False,
) -> DryRun:
    """How an unmodified training script fares on a device that need not be there.

    The script runs in a process of its own, in which PyTorch sees the device. What it prints goes where ours goes.

    Args:
        script: path of the script, or dotted name of a module.
        arguments: what the script is given.
        device: as for `estimate`; a CUDA device.
        module: whether `script` is the name of a module, as for `python -m`.
        count: how many such devices PyTorch sees; the figures are those of one of them.
        steps: optimizer steps after which the script is ended.
        scan: batches of its loader to look at for the largest; 0: none.
        checkpoint_folder: where the files that the script writes are kept; they are not by default.
        writable: folders in which what the script writes is real, such as downloads; made where they are missing.
        quiet_output: send what the script prints to standard error.
    """
    for option, value, least in (("count", count, 1), ("steps", steps, 1), ("scan", scan, 0)):
        if value < least:
            raise BadInput(f"{option} must be at least {least}, but {value} was given.")
    if isinstance(arguments, str):
        raise BadInput(f"arguments must be a list such as {arguments.split()!r}, but the text {arguments!r} was given.")
    name = os.fspath(script)
    # Processes are of no use to anyone who doesn't run a script.
    from memfit.runs.devices import has_devices
    from memfit.runs.keras_scripts import keras_backend
    from memfit.runs.sequence import dry_run, read_run
    from memfit.runs.target import find_target

    name = find_target(name, module=module)
    backend = keras_backend(name, module=module)
    target = resolve("cpu" if device is None and backend and not has_devices() else device)
    # Keras on PyTorch runs on the simulated device like any other script of PyTorch.
    until_fit = backend != "" and (backend != "torch" or target.kind is not Kind.CUDA)
    if target.kind is not Kind.CUDA and not until_fit:
        raise BadInput(
            f"only CUDA devices can be simulated for a script, but {target.name!r} was given. "
            "Name one, such as device='rtx-3090' (--device rtx-3090); `memfit devices` lists all."
        )
    # Refused here rather than by the script's process.
    parse_options(env.allocator_settings())
    if not until_fit:
        require_torch()
    folder = "" if checkpoint_folder is None else os.path.abspath(checkpoint_folder)
    shared = tuple(map(os.path.abspath, writable))
    for each in shared:
        os.makedirs(each, exist_ok=True)
    request = Request(
        name,
        module,
        tuple(map(str, arguments)),
        target,
        count,
        steps,
        scan,
        checkpoint_folder=folder,
        until_fit=until_fit,
        writable=shared,
    )
    if until_fit:
        return read_run(request, quiet_output=quiet_output)
    run, too_large = dry_run(request, quiet_output=quiet_output, announce=announce)
    return run if run.fits is not False or too_large is None else _advised(run, too_large)


def _advised(run: DryRun, too_large: "TooLarge") -> DryRun:
    """The run with what could be changed about its step, tried on the script itself as far as time allows."""
    from memfit.planner import advise
    from memfit.planner.move import Move, Situation
    from memfit.runs.sequence import peak_with

    began = time.perf_counter()
    seconds = max(_MIN_TRIAL_SECONDS, 2 * run.seconds)
    estimate, seen = too_large.estimate, too_large.seen

    def tried(move: Move) -> int | None:
        left = seconds - (time.perf_counter() - began)
        if left <= 0:
            return None
        announce(f"running the script with a change that may help ({move.title}), to see what it needs then")
        assert move.settings is not None
        return peak_with(too_large, move.settings, max(1, run.num_steps), left, accumulates=move.accumulates)

    situation = Situation(
        estimate.timeline,
        run.allocator,
        estimate.num_parameters,
        run.num_devices,
        seen.batch_size,
        seen.autocast,
        seen.fusable,
        autocast_of(estimate.device),
    )
    context_bytes = estimate.context_bytes + estimate.other_bytes
    found = advise(situation, estimate.replay, context_bytes=context_bytes, peak_with=tried)
    return replace(run, advice=found)


class _Search:
    """Looks for the largest batch that is safe and the largest that fits, on the scaled timelines."""

    def __init__(self, start: Estimate, neighbours: Sequence[int] = _FEW_NEIGHBOURS) -> None:
        self._start = start
        self._neighbours = neighbours
        self._seen: dict[int, Estimate] = {}
        if start.batch_size is not None:
            self._seen[start.batch_size] = start

    def run(self, candidates: list[int] | None) -> MaxBatch:
        if candidates is not None:
            best = self._bisect(lambda i: self._fits(candidates[i]), len(candidates))
            limit = candidates[best] if best is not None else None
        else:
            limit = self._largest()
        sizes: Sequence[int] = range(1, (limit or 0) + 1)
        if candidates is not None:
            sizes = [size for size in candidates if limit is not None and size <= limit]
        safe = self._safe(sizes)
        tried = tuple((n, e.peak_bytes, bool(e.fits)) for n, e in sorted(self._seen.items()))
        shown = next((size for size in (safe, limit) if size is not None), min(self._seen))
        return MaxBatch(safe, self._seen[shown], tried, limit)

    def _safe(self, sizes: Sequence[int]) -> int | None:
        """The largest size that is safe, below which every one that was looked at fits."""
        count = len(sizes)
        while (best := self._bisect(lambda i: self._is_safe(sizes[i]), count)) is not None:
            # What the allocator makes of sizes goes up and down: those right below must fit, too.
            below = {best - step for step in self._neighbours if step <= best}
            below |= {place for place in range(best) if sizes[place] in self._seen}
            # A single sample may be refused for other reasons, such as by batch norm.
            failing = [place for place in below if sizes[place] > 1 and not self._is_passed(sizes[place])]
            if not failing:
                return sizes[best]
            count = min(failing)
        return None

    def _is_passed(self, batch_size: int) -> bool:
        """Whether a size fits that is not in question itself, and is worth a line only where it doesn't."""
        known = batch_size in self._seen
        fits = self._fits(batch_size)
        if fits and not known:
            del self._seen[batch_size]
        return fits

    def _is_safe(self, batch_size: int) -> bool:
        if not self._fits(batch_size):
            return False
        estimate = self._seen[batch_size]
        return estimate.upper_bytes <= _SAFE_SHARE * (estimate.capacity_bytes or 0)

    def _largest(self) -> int | None:
        high = max(1, self._start.batch_size or 1)
        while self._fits(high):
            if high >= _LARGEST_BATCH:
                return high
            high *= 2
        best = self._bisect(lambda i: self._fits(i + 1), high - 1)
        return best + 1 if best is not None else None

    @staticmethod
    def _bisect(fits: Callable[[int], bool], count: int) -> int | None:
        """Last index of `count` that fits; None when the first doesn't."""
        low, high = -1, count
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low if low >= 0 else None

    def _at(self, batch_size: int) -> Estimate:
        if batch_size not in self._seen:
            self._seen[batch_size] = self._start.at_batch(batch_size)
        return self._seen[batch_size]

    def _fits(self, batch_size: int) -> bool:
        try:
            return bool(self._at(batch_size).fits)
        except StepFailed:
            # Batch norm, for one, refuses to train on a single sample.
            if batch_size > 1:
                raise
            return False

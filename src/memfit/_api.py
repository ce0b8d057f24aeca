"""The public verbs, composed from the parts: trace, replay, report."""

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

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
from memfit.allocator import parse_options
from memfit.core import dryrun as dryrun_results
from memfit.core import env
from memfit.core import estimate as estimate_results
from memfit.core.device import Device, Kind
from memfit.core.dryrun import DryRun, Request
from memfit.core.errors import BadBatch, BadInput, StepFailed
from memfit.core.estimate import Estimate
from memfit.core.job import Job
from memfit.core.replay import AllocatorOptions
from memfit.reports import run_text, text

_LARGEST_BATCH = 2**24


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
        loss: takes the model and a batch and returns the scalar loss. Keras has it from `compile`.
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
    return Estimator(job, resolve(device), allocator or AllocatorOptions(), size).run()


@dataclass(frozen=True, slots=True)
class MaxBatch:
    """The largest batch that fits.

    Args:
        batch_size: the answer; None when not even the smallest fits.
        estimate: the estimate at that batch size, or at the smallest one tried when nothing fits.
        tried: (batch size, bytes needed where nothing limits the allocator, fits) of every size looked at, in order.
            A size may fit though it would take more than there is: the allocator then releases its cache.
    """

    batch_size: int | None
    estimate: Estimate
    tried: tuple[tuple[int, int, bool], ...]


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
    """The largest batch that fits, from a handful of traces.

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
    start = Estimator(job, target, allocator or AllocatorOptions()).run()
    if start.batch_size is None:
        raise BadBatch(
            "the batch's tensors share no first dimension, so it can't be made larger or smaller. "
            "Give tensors whose first dimension is the batch."
        )
    return _Search(start).run(sizes)


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
        checkpoint_folder: where checkpoints go that the script writes; a temporary place by default.
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
    given = tuple(map(str, arguments))
    request = Request(name, module, given, target, count, steps, scan, checkpoint_folder=folder, until_fit=until_fit)
    if until_fit:
        return read_run(request, quiet_output=quiet_output)
    run, too_large = dry_run(request, quiet_output=quiet_output, announce=_announce)
    return run if run.fits is not False or too_large is None else _advised(run, too_large)


def _advised(run: DryRun, too_large: Estimate) -> DryRun:
    """The run with what could be changed about its step."""
    from memfit.planner import advise

    found = advise(
        too_large.timeline,
        too_large.replay,
        run.allocator,
        context_bytes=too_large.context_bytes + too_large.other_bytes,
        num_parameters=too_large.num_parameters,
        num_devices=run.num_devices,
    )
    return replace(run, advice=found)


def _announce(text: str) -> None:
    print(f"memfit: {text}", file=sys.stderr, flush=True)


class _Search:
    """Looks for the largest batch that fits, on the scaled timelines."""

    def __init__(self, start: Estimate) -> None:
        self._start = start
        self._seen: dict[int, Estimate] = {}
        if start.batch_size is not None:
            self._seen[start.batch_size] = start

    def run(self, candidates: list[int] | None) -> MaxBatch:
        if candidates is not None:
            best = self._bisect(lambda i: self._fits(candidates[i]), len(candidates))
            size = candidates[best] if best is not None else None
        else:
            size = self._largest()
        tried = tuple((n, e.upper_bytes, bool(e.fits)) for n, e in sorted(self._seen.items()))
        return MaxBatch(size, self._seen[size if size is not None else min(self._seen)], tried)

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

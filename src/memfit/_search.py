"""`memfit.search` and `memfit.ensemble`: several models, one in memory at a time."""

import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit._api import max_batch
from memfit._estimator import own_gpu, require_torch
from memfit.catalogue import find_device
from memfit.core.errors import BadInput
from memfit.core.guarding import CannotFit, Where
from memfit.core.units import format_size, parse_size
from memfit.guard.ensemble import Sequence, as_members, readable_again
from memfit.guard.search import RAISE, SKIP, Loop, Search, Trial
from memfit.guard.space import Space


def search(
    train: Callable[[dict[str, Any], Trial], Any],
    space: Mapping[str, Any],
    *,
    trials: int = 20,
    seed: int = 0,
    folder: str | os.PathLike[str] = "runs/search",
    maximize: bool = False,
    resume: bool = True,
    on_error: str = RAISE,
) -> Search:
    """The best parameters of a training, found with one model in memory at a time.

    Args:
        train: takes a dictionary of parameters and a `Trial`, builds and trains its own model, and returns the score.
            `trial.keep(model)` hands over the model whose parameters go to disk if the trial is the best so far.
        space: name to a list of choices, `(low, high)`, `("log", low, high)`, or a function of a `random.Random`.
        trials: how many to run. Where all parameters are lists with no more combinations than that, every combination
            is run once; otherwise points are drawn.
        seed: of the points drawn and, with a trial's number, of the generators at the trial's beginning.
        folder: where results and the parameters of the best trial go.
        maximize: whether a greater score is better.
        resume: whether trials that have ended in `folder` count; otherwise they are dropped.
        on_error: "raise", or "skip" to go on after a trial that has failed. Running out of memory never ends a search.
    """
    if not callable(train):
        raise BadInput(
            f"train must be a function of (parameters, trial) that returns the score, but {train!r} was given."
        )
    for name, value, least in (("trials", trials, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadInput(f"{name} must be a whole number from {least} up, but {value!r} was given.")
    if on_error not in (RAISE, SKIP):
        raise BadInput(f"on_error must be {RAISE!r} or {SKIP!r}, but {on_error!r} was given.")
    ranges = Space(space)
    require_torch()
    from memfit.adapters.torch.guarding.snapshot import RandomState

    loop = Loop(train, ranges, Path(folder), _Torch(), maximize, on_error)
    generators = RandomState.now()
    try:
        return loop.run(trials, seed, resume=resume)
    finally:
        generators.restore()


def ensemble(
    members: Iterable[Any],
    predict: Callable[[Any, Any], Any],
    batches: Iterable[Any],
    *,
    budget: str | int | None = None,
    combine: str | Callable[[Any], Any] = "mean",
    precise: bool = False,
) -> list[Any]:
    """The combined predictions of several models, of which one is in memory at a time.

    Args:
        members: functions that build a model, or pairs of such a function and a file of parameters (safetensors), as
            `memfit.search` keeps them. Each is built, used in evaluation mode, and freed before the next.
        predict: takes a model and a batch and returns a tensor, or a tuple or dictionary of tensors.
        batches: read once per member: a list, or a loader with the same order every time.
        budget: memory that the passes of a member may take, such as "2GiB", its own parameters included: batches are
            split so that they stay within it. Without it they are split where memory runs out.
        combine: "mean", "sum", "vote" (the label most members give), "stack" (all outputs, members first), or a
            function of such a stack.
        precise: whether sums and means are added up in float64.

    Returns:
        One result per batch, in host memory.
    """
    if not callable(predict):
        raise BadInput(f"predict must be a function of (model, batch) that returns tensors, but {predict!r} was given.")
    budget_bytes = None if budget is None else _checked_budget(budget)
    require_torch()
    from memfit.adapters.torch.guarding import members as torch_members
    from memfit.adapters.torch.guarding import parameters

    def loaded(build: Callable[[], Any], file: Any) -> Callable[[], Any]:
        path = Path(file)
        if not path.is_file():
            raise BadInput(f"there is no file {str(path)!r}; give a file of parameters (safetensors).")

        def built() -> Any:
            model = build()
            parameters.read(model, path)
            return model

        return built

    def plain(build: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: torch_members.ready(build())

    found = as_members(members, loaded, torch_members.is_model)
    for member in found:
        member.build = plain(member.build)
    combined = torch_members.combined_by(combine, precise)
    readable = readable_again(batches)
    if torch_members.shuffles(batches):
        raise BadInput("the loader shuffles, and each member reads it anew. Give one with shuffle=False.")

    sizes: dict[object, int | None] = {}

    def size_within(model: Any, batch: Any) -> int | None:
        if budget_bytes is None:
            return None
        # Members are mostly alike, and a trace takes about a second.
        alike = torch_members.structure(model), torch_members.batch_size(batch)
        if alike not in sizes:
            sizes[alike] = _size_within(budget_bytes, model, predict, batch)
        return sizes[alike]

    framework = _TorchMembers()
    return Sequence(found, predict, readable, framework, combined, size_within, _warn).run()


def _checked_budget(budget: Any) -> int:
    if isinstance(budget, bool) or not isinstance(budget, str | int):
        raise BadInput(f"a budget is a size such as '10GiB' or a number of bytes, but {budget!r} was given.")
    return parse_size(budget)


def _size_within(budget_bytes: int, model: Any, predict: Callable[[Any, Any], Any], batch: Any) -> int | None:
    """The most samples of a pass that stays within the budget, as a trace says; None where the batch can't be split."""
    from memfit.adapters.torch.guarding import members as torch_members
    from memfit.adapters.torch.oom import where_of

    samples = torch_members.batch_size(batch)
    if samples is None:
        return None
    device = find_device("cpu") if where_of(model) is Where.HOST else own_gpu()
    target = replace(device, usable_bytes=budget_bytes)
    sizes = sorted({-(-samples // 2**power) for power in range(samples.bit_length() + 1)})
    found = max_batch(model, predict, batch, device=target, mode="inference", candidates=sizes)
    if found.batch_size is None:
        raise CannotFit(
            f"a member of the ensemble needs {format_size(found.estimate.peak_bytes)} with one sample at a time, and "
            f"the budget is {format_size(budget_bytes)}. Give a larger budget or a smaller member."
        )
    return found.batch_size


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=4)


class _TorchMembers:
    """PyTorch, as an ensemble needs it."""

    def __init__(self) -> None:
        from memfit.adapters.torch import oom
        from memfit.adapters.torch.guarding import members, release_model

        self.recognise = oom.recognise
        self.clear_frames = oom.clear_frames
        self.release = oom.release
        self.watch = release_model.watch
        self.predict = members.predict
        self.batch_size = members.batch_size
        self.split = members.split
        self.join = members.join
        self.fingerprint = members.fingerprint


class _Torch:
    """PyTorch, as a search needs it."""

    def __init__(self) -> None:
        from memfit.adapters.torch import oom
        from memfit.adapters.torch.guarding import parameters, release_model

        self.recognise = oom.recognise
        self.clear_frames = oom.clear_frames
        self.watch = release_model.watch
        self.write = parameters.write
        self.read = parameters.read
        self.manual_seed = release_model.manual_seed

    def seed(self, value: int) -> None:
        random.seed(value)
        self.manual_seed(value)
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:
            numpy_random.seed(value)

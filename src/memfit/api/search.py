"""`memfit.search` and `memfit.ensemble`: several models, one in memory at a time."""

import importlib.util
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.api.devices import own_gpu
from memfit.api.jobs import require_torch
from memfit.api.max_batch import max_batch
from memfit.catalogue import find_device
from memfit.core.errors import BadInput, MissingDependency, how_to_install
from memfit.core.guarding import CannotFit, Where
from memfit.core.units import format_size, parse_size

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

    from memfit.guard.search import Search, Trial


def search(
    objective: "Callable[[Trial], Any]",
    *,
    trials: int = 20,
    folder: str | os.PathLike[str] = "runs/search",
    direction: str = "minimize",
    seed: int = 0,
    sampler: "BaseSampler | None" = None,
    pruner: "BasePruner | None" = None,
    on_error: str = "raise",
) -> "Search":
    """The best hyper-parameters of a training, searched by Optuna with one model in memory at a time.

    Args:
        objective: takes a trial (Optuna's, with `suggest_float` and so on), builds and trains its own model, and
            returns the score. `trial.keep(model)` hands over the model whose parameters go to disk if the trial is the
            best so far.
        trials: how many to run, those in `folder` that have ended included.
        folder: where Optuna's journal and the parameters of the best trial go. A search that was interrupted goes on
            from there.
        direction: "minimize" or "maximize".
        seed: of the default sampler and, with a trial's place in the search, of the generators when a trial begins.
        sampler: any of Optuna's; by default TPE.
        pruner: any of Optuna's, for trials that report values and ask `trial.should_prune()`; by default the median.
        on_error: "raise", or "skip" to go on after a trial that has failed. OOM never ends a search.
    """
    if not callable(objective):
        raise BadInput(
            f"objective must be a function that takes a trial and returns the score, but {objective!r} was given."
        )
    for name, value, least in (("trials", trials, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadInput(f"{name} must be a whole number from {least} up, but {value!r} was given.")
    for name, given, allowed in (
        ("direction", direction, ("minimize", "maximize")),
        ("on_error", on_error, ("raise", "skip")),
    ):
        if given not in allowed:
            raise BadInput(f"{name} must be {allowed[0]!r} or {allowed[1]!r}, but {given!r} was given.")
    require_torch()
    if importlib.util.find_spec("optuna") is None:
        raise MissingDependency(f"memfit.search needs Optuna. Install it with {how_to_install('optuna')}.")
    from memfit.frameworks.torch.guard import release_model
    from memfit.frameworks.torch.guard.snapshot import RandomState
    from memfit.guard.search import Loop, open_study

    study = open_study(Path(folder), direction, pruner)
    generators = RandomState.now()
    try:
        return Loop(objective, study, Path(folder), release_model, seed, sampler, on_error).run(trials)
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
    if isinstance(budget, bool) or not isinstance(budget, str | int | None):
        raise BadInput(f"a budget is a size such as '10GiB' or a number of bytes, but {budget!r} was given.")
    budget_bytes = None if budget is None else parse_size(budget)
    require_torch()
    from memfit.frameworks.torch.guard.ensemble import Combined, Ensemble, structure
    from memfit.frameworks.torch.shapes.batch import common_first_dimension

    sizes: dict[object, int | None] = {}

    def size_within(model: Any, batch: Any) -> int | None:
        samples = common_first_dimension(batch)
        if budget_bytes is None or samples is None:
            return None
        # Members are mostly alike, and a trace takes about a second.
        alike = structure(model), samples
        if alike not in sizes:
            sizes[alike] = _size_within(budget_bytes, model, predict, batch, samples)
        return sizes[alike]

    return Ensemble(members, predict, batches, Combined(combine, precise), size_within).run()


def _size_within(budget_bytes: int, model: Any, predict: Callable[[Any, Any], Any], batch: Any, samples: int) -> int:
    """The most samples of a pass that stays within the budget, as a trace says."""
    from memfit.frameworks.torch.oom import where_of

    device = find_device("cpu") if where_of(model) is Where.HOST else own_gpu()
    target = replace(device, usable_bytes=budget_bytes)
    sizes = sorted({-(-samples // 2**power) for power in range(samples.bit_length() + 1)})
    largest = max_batch(model, predict, batch, device=target, mode="inference", candidates=sizes)
    if largest.batch_size is None:
        raise CannotFit(
            f"a member of the ensemble needs {format_size(largest.estimate.peak_bytes)} with one sample at a time, and "
            f"the budget is {format_size(budget_bytes)}. Give a larger budget or a smaller member."
        )
    return largest.batch_size

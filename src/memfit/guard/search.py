"""A search for the best parameters of a training that holds one model at a time.

What is kept of the best trial is the values of its model's parameters, in a file. Nothing else outlives a trial: after
each, the framework is asked whether anything of the trial's models is still there, and the name of whatever holds it
goes into the result. The framework is handed in, so that all this works, and is tested, without one.
"""

import math
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from memfit.catalogue.host import resident_bytes
from memfit.core.errors import BadInput, MemfitError, StepFailed
from memfit.core.guarding import OutOfMemory
from memfit.core.printing import printable
from memfit.core.shown import Shown
from memfit.core.units import format_size
from memfit.guard.space import Space, described_point, key_of
from memfit.guard.trials import Outcome, Record, Trials, best_of

# What a process that was killed leaves of a file that it was writing.
_LEFT = re.compile(r"\.trial-\d{4,}\.safetensors\.\d+\.tmp")

RAISE, SKIP = "raise", "skip"


class Framework(Protocol):
    """What a search needs of a framework."""

    def recognise(self, error: BaseException) -> OutOfMemory | None:
        """The failure to get memory that an exception is about, or None."""

    def clear_frames(self, error: BaseException) -> None:
        """Drops what the frames of an exception hold."""

    def seed(self, value: int) -> None:
        """Seeds all generators of random numbers."""

    def watch(self) -> Callable[[], str]:
        """Remembers what is there; the function returned frees all it can and says what a trial has left, or ""."""

    def write(self, model: Any, path: Path) -> None:
        """Writes the values of a model's parameters and buffers, whole or not at all."""

    def read(self, model: Any, path: Path) -> None:
        """Gives a model the values that `write` wrote."""


class Trial:
    """What `train` is told about the trial it runs, and where it hands over its model.

    Args:
        number: of the trial, from 0 up.
        seed: of the trial; all generators have been seeded with it.
        offer: called with the model and its score, or None for the score that `train` returns.
    """

    def __init__(self, number: int, seed: int, offer: "Callable[[Any, float | None], None]") -> None:
        self.number = number
        self.seed = seed
        self._offer = offer

    def keep(self, model: Any, score: float | None = None) -> None:
        """Hands over the model whose parameters are to be kept if this trial is the best so far.

        Args:
            model: it is held until the trial ends, or not at all where a score is given.
            score: of the model as it is now, such as after an epoch: its parameters are written right away if that is
                the best score so far. `train` then returns this trial's best score, or None.
        """
        self._offer(model, score)


@dataclass(frozen=True, slots=True)
class Best:
    """The best trial.

    Args:
        number: of the trial.
        parameters: what it was given.
        score: what it reached.
        path: file with the values of its model's parameters (safetensors); None where no model was handed over.
    """

    number: int
    parameters: dict[str, Any]
    score: float
    path: Path | None


@dataclass(frozen=True, slots=True, repr=False)
class Search(Shown):
    """What a search has found; `print` shows a table of it.

    Args:
        trials: every trial, in order.
        best: the best one; None where no trial has finished.
        folder: with the results and the parameters of the best trial.
        maximize: whether a greater score is better.
        framework: what loads the parameters.
    """

    trials: tuple[Record, ...]
    best: Best | None
    folder: Path
    maximize: bool
    framework: Framework

    def load_best(self, model: Any) -> Any:
        """Gives `model` the parameters of the best trial, and returns it.

        Args:
            model: built as `train` built it for `best.parameters`.
        """
        if self.best is None or self.best.path is None:
            missing = "no trial has finished" if self.best is None else "its trial never called trial.keep(model)"
            raise BadInput(f"there are no best parameters to load: {missing}.")
        self.framework.read(model, self.best.path)
        return model

    def summary(self) -> str:
        """How many trials there were, and the best."""
        best = "none has finished" if self.best is None else f"best {self.best.score:.6g} in trial {self.best.number}"
        return f"of {len(self.trials)} trials: {best}"

    def __str__(self) -> str:
        return "\n".join(printable(line) for line in _table(self))

    def to_json(self) -> dict[str, Any]:
        """A plain structure that `json` can write."""
        best = self.best and {
            "number": self.best.number,
            "parameters": described_point(self.best.parameters),
            "score": self.best.score,
            "path": None if self.best.path is None else str(self.best.path),
        }
        trials = [
            {**{name: getattr(record, name) for name in Record.__slots__}, "outcome": record.outcome.value}
            for record in self.trials
        ]
        return {"format": "memfit.search", "version": 1, "maximize": self.maximize, "best": best, "trials": trials}


@dataclass(frozen=True, slots=True)
class Loop:
    """The search itself.

    Args:
        train: takes parameters and a `Trial`, returns the score.
        space: what the parameters may be.
        folder: where results go.
        framework: what knows models.
        maximize: whether a greater score is better.
        on_error: "raise", or "skip" to go on after a trial that has failed.
    """

    train: Callable[[dict[str, Any], Trial], Any]
    space: Space
    folder: Path
    framework: Framework
    maximize: bool = False
    on_error: str = RAISE

    def run(self, trials: int, seed: int, *, resume: bool) -> Search:
        """Runs every trial that has not ended before."""
        points = self.space.points(trials, seed)
        header = {"space": self.space.described, "seed": seed, "maximize": self.maximize}
        results = Trials(self.folder, header, resume=resume)
        self._tidy(results)
        for number, point in enumerate(points):
            # What has failed is tried again, for its reason may be gone; what was too large once is too large.
            if not any(r.outcome is not Outcome.FAILED for r in results.records if _is_of(r, point)):
                self._trial(_free_number(number, point, results), point, seed, results)
        return self._result(points, results)

    def _trial(self, number: int, point: dict[str, Any], seed: int, results: Trials) -> None:
        leftovers = self.framework.watch()
        own_seed = (seed * 1_000_003 + number) % 2**32
        self.framework.seed(own_seed)
        started = time.perf_counter()
        offers = _Offers(self, number, results)
        failure: BaseException | None = None
        score, weights = None, ""
        try:
            found = offers.settled(self.train(dict(point), Trial(number, own_seed, offers.take)))
            score, weights = found, offers.weights(found)
        except Exception as error:
            failure = error
        seconds = time.perf_counter() - started
        outcome, text = self._judged(failure)
        # Everything of the trial must go before anyone looks for what is left of it.
        offers.drop()
        ended = failure if outcome is Outcome.FAILED and self.on_error == RAISE else None
        failure = None
        held = "" if ended is not None else leftovers()
        record = Record(number, described_point(point), outcome, score, seconds, weights, text, held, resident_bytes())
        results.add(record)
        self._tidy(results)
        if ended is not None:
            raise _failed(record) from ended
        if held:
            warnings.warn(f"trial {number} of the search has ended, but {held}", UserWarning, stacklevel=4)

    def _judged(self, failure: BaseException | None) -> tuple[Outcome, str]:
        if failure is None:
            return Outcome.FINISHED, ""
        known = self.framework.recognise(failure)
        text = f"{type(failure).__name__}: {failure}".split("\n", 1)[0][:300]
        if known is None and self.on_error == RAISE:
            return Outcome.FAILED, text
        self.framework.clear_frames(failure)
        return (Outcome.FAILED if known is None else Outcome.OUT_OF_MEMORY), text

    def better(self, score: float, other: float | None) -> bool:
        """Whether a score is better than another, or than none."""
        return other is None or (score > other if self.maximize else score < other)

    def _tidy(self, results: Trials) -> None:
        """Removes parameters that are no longer those of the best trial, and what a killed process left of a file."""
        best = best_of(results.records, maximize=self.maximize)
        # Other files in the folder, whatever their names, are somebody else's.
        known = {f"trial-{record.number:04d}.safetensors" for record in results.records}
        for path in (*self.folder.glob("trial-*.safetensors"), *self.folder.glob(".trial-*.tmp")):
            is_own = path.name in known or _LEFT.fullmatch(path.name) is not None
            if is_own and (best is None or path.name != best.weights):
                path.unlink(missing_ok=True)

    def _result(self, points: list[dict[str, Any]], results: Trials) -> Search:
        records = {key_of(record.parameters): record for record in results.records}
        ended = tuple(sorted(records.values(), key=lambda record: record.number))
        found = best_of(results.records, maximize=self.maximize)
        best = None
        if found is not None and found.score is not None:
            # Parameters that JSON doesn't have are taken from the space.
            parameters = next((point for point in points if _is_of(found, point)), found.parameters)
            path = self.folder / found.weights if found.weights else None
            best = Best(found.number, parameters, found.score, path)
        return Search(ended, best, self.folder, self.maximize, self.framework)


class _Offers:
    """The models that one trial hands over.

    Args:
        loop: the search.
        number: of the trial.
        results: of the trials so far.
    """

    def __init__(self, loop: Loop, number: int, results: Trials) -> None:
        self._loop = loop
        best = best_of(results.records, maximize=loop.maximize)
        self._to_beat = None if best is None else best.score
        self._path = loop.folder / f"trial-{number:04d}.safetensors"
        self._model: Any = None
        self._kept: float | None = None
        self._written = False

    def take(self, model: Any, score: float | None) -> None:
        """What `Trial.keep` does."""
        if score is None:
            self._model = model
            return
        value = _number(score, "trial.keep was given the score")
        if value is None or not self._loop.better(value, self._kept):
            return
        self._kept = value
        if self._loop.better(value, self._to_beat):
            self._loop.framework.write(model, self._path)
            self._written = True

    def settled(self, returned: Any) -> float | None:
        """The score of the trial."""
        if self._kept is None:
            return _number(returned, "train returned")
        if returned is not None and _number(returned, "train returned") != self._kept:
            raise BadInput(
                f"train returned {returned!r}, but the best score given to trial.keep was {self._kept!r}, and those "
                "parameters were kept. Return None, or the best score."
            )
        return self._kept

    def weights(self, score: float | None) -> str:
        """Name of the file with the trial's parameters, where they are the best so far; otherwise ""."""
        has_model = self._model is not None and self._kept is None
        if has_model and score is not None and self._loop.better(score, self._to_beat):
            self._loop.framework.write(self._model, self._path)
            self._written = True
        return self._path.name if self._written else ""

    def drop(self) -> None:
        """Lets the model go."""
        self._model = None


def _number(value: Any, what: str) -> float | None:
    """A score; None for one that is not finite, which is never the best."""
    # A loss with its graph would warn.
    plain = value.detach() if hasattr(value, "detach") else value
    try:
        number = None if isinstance(plain, bool | str) else float(plain)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None:
        raise BadInput(f"{what} {value!r}, but a score must be a number. Return a float, such as the validation loss.")
    return number if math.isfinite(number) else None


def _is_of(record: Record, point: dict[str, Any]) -> bool:
    return key_of(record.parameters) == key_of(point)


def _free_number(number: int, point: dict[str, Any], results: Trials) -> int:
    """The number of a new trial: its place, where no other trial has it.

    Points come in another order once a search is given trials enough for all of them.
    """
    used = {record.number for record in results.records if not _is_of(record, point)}
    return number if number not in used else max(used) + 1


def _failed(record: Record) -> MemfitError:
    return StepFailed(
        f"trial {record.number} of the search failed with {record.parameters}: {record.error}. The trials before it "
        "are kept; run the same search again to go on from here, or give on_error='skip' to leave out trials that fail."
    )


def _table(search: Search) -> list[str]:
    names = list(search.trials[0].parameters) if search.trials else []
    rows = [["trial", *names, "score", "seconds", "memory after", ""]]
    for record in search.trials:
        mark = "best" if search.best is not None and record.number == search.best.number else ""
        ended = record.outcome.value if record.outcome is not Outcome.FINISHED else ""
        remarks = ", ".join(filter(None, [mark, ended, "model not freed" if record.held else ""]))
        score = "-" if record.score is None else f"{record.score:.6g}"
        memory = format_size(record.memory_bytes)
        values = [_shown(record.parameters.get(name)) for name in names]
        rows.append([str(record.number), *values, score, f"{record.seconds:.1f}", memory, remarks])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]).rstrip() for row in rows]
    counts = {outcome: sum(record.outcome is outcome for record in search.trials) for outcome in Outcome}
    title = f"{len(search.trials)} trials: " + ", ".join(
        f"{number} {outcome}" for outcome, number in counts.items() if number
    )
    goal = "highest" if search.maximize else "lowest"
    end = (
        "no score among them"
        if search.best is None
        else f"{goal} score {search.best.score:.6g} in trial {search.best.number}"
    )
    if search.best is not None and search.best.path is not None:
        end += f", its parameters in {search.best.path}"
    return [title, *lines, end]


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""A hyper-parameter search that holds one model at a time, on top of Optuna.

Optuna samples, prunes, and logs every trial to a journal file. What this adds: after each trial the framework is asked
whether anything of the trial's model is still in memory, and by whom it is held; the parameters of the best model are
kept in a file; a trial that hits OOM counts as a failed trial with its reason; and a search that was killed goes on at
the trial that it was killed in. The framework is handed in, so that all this works, and is tested, without one.
"""

import math
import os
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import optuna
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from memfit.catalogue.host import resident_bytes
from memfit.core.errors import BadFile, BadInput, StepFailed
from memfit.core.oom import clear_frames, recognise
from memfit.core.printing import printable
from memfit.core.shown import Shown
from memfit.core.units import format_size

JOURNAL = "journal.log"
STUDY = "memfit.search"

FINISHED, PRUNED, NO_SCORE, OUT_OF_MEMORY, FAILED = "finished", "pruned", "no finite score", "out of memory", "failed"

_OWN_FILE = re.compile(r"\.?trial-(\d{4,})\.safetensors(?:\.\d+\.tmp)?")


class Framework(Protocol):
    """What a search needs of a framework."""

    def seed(self, value: int, /) -> None:
        """Seeds all generators of random numbers."""

    def watch(self) -> Callable[[], str]:
        """Remembers what is there; the function returned frees all it can and says what a trial has left, or ""."""

    def write(self, model: Any, path: Path, /) -> None:
        """Writes the values of a model's parameters and buffers, whole or not at all."""

    def read(self, model: Any, path: Path, /) -> None:
        """Gives a model the values that `write` wrote."""


class Trial(optuna.trial.Trial):
    """An Optuna trial that also takes the model whose parameters are to be kept.

    All generators have been seeded with its `seed`; `best` is the study's best score so far, or None.
    """

    def __init__(self, trial: optuna.trial.Trial, seed: int, best: float | None, write: Callable[[Any], None]) -> None:
        # The constructor of the base class would ask the sampler again.
        self.__dict__.update(trial.__dict__)
        self.seed = seed
        self._best = best
        self._write = write
        self._model: Any = None
        self._kept: float | None = None

    def keep(self, model: Any, score: float | None = None) -> None:
        """Hands over the model whose parameters are to be kept if this trial is the best so far.

        Args:
            model: it is held until the trial ends, or not at all where a score is given.
            score: of the model as it is now, such as after an epoch: its parameters are written right away if that is
                the best score so far. The objective then returns this trial's best score, or None.
        """
        if score is None:
            self._model = model
            return
        value = _number(score, "trial.keep was given the score")
        if self._better(value, self._kept):
            self._kept = value
            if self._better(value, self._best):
                self._write(model)

    def end(self, returned: Any) -> float:
        """The score of the trial, from what the objective returned; writes the model that is still held."""
        if self._kept is None:
            value = _number(returned, "the objective returned")
            if self._model is not None and self._better(value, self._best):
                self._write(self._model)
            return value
        if returned is not None and _number(returned, "the objective returned") != self._kept:
            raise BadInput(
                f"the objective returned {returned!r}, but the best score given to trial.keep was {self._kept!r}, and "
                "those parameters were kept. Return None, or the best score."
            )
        return self._kept

    def drop(self) -> None:
        """Lets the model go."""
        self._model = None

    def _better(self, score: float, other: float | None) -> bool:
        is_greater = self.study.direction is StudyDirection.MAXIMIZE
        return math.isfinite(score) and (other is None or (score > other if is_greater else score < other))


@dataclass(frozen=True, slots=True, repr=False)
class Search(Shown):
    """The result of a search; `print` shows a table of it.

    Args:
        study: Optuna's study. The user attributes of its trials: "outcome", "error", "seconds", "held" (who held the
            model when the trial had ended) and "memory_bytes" (resident memory after the trial).
        folder: with the journal and the parameters of the best trial.
        framework: what loads the parameters.
    """

    study: optuna.Study
    folder: Path
    framework: Framework

    @property
    def trials(self) -> tuple[FrozenTrial, ...]:
        """Every trial that has ended; one that was run again is there once."""
        return tuple(trial for trial in _by_position(self.study).values() if "outcome" in trial.user_attrs)

    @property
    def best(self) -> FrozenTrial | None:
        """The best trial: its `number`, `params` and `value`; None where no trial has finished."""
        return _best(self.study)

    @property
    def best_path(self) -> Path | None:
        """The file with the parameters of the best trial's model (safetensors); None where none was kept."""
        best = self.best
        path = None if best is None else self.folder / _file_name(best.number)
        return path if path is not None and path.exists() else None

    def load_best(self, model: Any) -> Any:
        """Gives `model` the parameters of the best trial, and returns it.

        Args:
            model: built as the objective built it for `best.params`.
        """
        path = self.best_path
        if path is None:
            missing = "no trial has finished" if self.best is None else "its trial never called trial.keep(model)"
            raise BadInput(f"there are no best parameters to load: {missing}.")
        self.framework.read(model, path)
        return model

    def summary(self) -> str:
        """How many trials there were, and the best."""
        best = self.best
        return f"of {len(self.trials)} trials: " + (
            "none has finished" if best is None else f"best {best.value:.6g} in trial {best.number}"
        )

    def __str__(self) -> str:
        trials, best = self.trials, self.best
        outcomes = [trial.user_attrs["outcome"] for trial in trials]
        counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes))
        end = "no score among them"
        if best is not None:
            goal = "lowest" if self.study.direction is StudyDirection.MINIMIZE else "highest"
            end = f"{goal} score {best.value:.6g} in trial {best.number}"
        if self.best_path is not None:
            end += f", its parameters in {self.best_path}"
        lines = [f"{len(trials)} trials: {counts}", *_table(trials, best), end]
        return "\n".join(printable(line) for line in lines)

    def to_json(self) -> dict[str, Any]:
        """A plain structure that `json` can write."""
        best, path = self.best, self.best_path
        trials = [
            {"number": trial.number, "parameters": trial.params, "score": trial.value, **trial.user_attrs}
            for trial in self.trials
        ]
        return {
            "format": "memfit.search",
            "version": 1,
            "direction": self.study.direction.name.lower(),
            "best": best and {"number": best.number, "path": None if path is None else str(path)},
            "trials": trials,
        }


@dataclass(frozen=True, slots=True)
class Loop:
    """The search itself."""

    objective: Callable[[Trial], Any]  # takes a `Trial`, returns the score
    study: optuna.Study  # where trials go
    folder: Path  # where the parameters of the best trial go
    framework: Framework  # what knows models
    seed: int = 0  # of the sampler, where it is the default one, and of the generators
    sampler: optuna.samplers.BaseSampler | None = None  # the user's own, or None
    on_error: str = "raise"  # "raise", or "skip" to go on after a trial that has failed

    def run(self, trials: int) -> Search:
        """Runs every trial that has not ended before."""
        ended = self._requeue()
        self._tidy(self.study)
        self.study.sampler = self.sampler or self.study.sampler
        if ended < trials:
            self.study.optimize(self._trial, trials - ended, catch=_Skipped, callbacks=[self._tidy])
        return Search(self.study, self.folder, self.framework)

    def _requeue(self) -> int:
        """Queues trials that were interrupted or have failed, and returns the number of those that have ended."""
        ended = 0
        for position, trial in _by_position(self.study).items():
            if trial.state.is_finished() and trial.user_attrs.get("outcome", FAILED) != FAILED:
                ended += 1
            elif trial.state is not TrialState.WAITING:
                # As `enqueue_trial`, but a grid sampler's mark stays with the trial.
                marks = {**trial.system_attrs, "fixed_params": trial.params}
                again = create_trial(state=TrialState.WAITING, system_attrs=marks, user_attrs={"position": position})
                self.study.add_trial(again)
        for trial in self.study.get_trials(states=[TrialState.RUNNING]):
            self.study.tell(trial.number, state=TrialState.FAIL)
        return ended

    def _tidy(self, study: optuna.Study, _: object = None) -> None:
        """Removes files of trials that are not the best one."""
        trials, best = study.get_trials(deepcopy=False), _best(study)
        for path in self.folder.iterdir():
            own = _OWN_FILE.fullmatch(path.name)
            # Other files in the folder, whatever their names, are somebody else's.
            if own and int(own[1]) < len(trials) and (best is None or path.name != _file_name(best.number)):
                path.unlink(missing_ok=True)

    def _trial(self, plain: optuna.trial.Trial) -> float:
        """What Optuna calls as the objective."""
        position = plain.user_attrs.get("position", len(_by_position(self.study)))
        plain.set_user_attr("position", position)
        seed, best = (self.seed * 1_000_003 + position) % 2**32, _best(self.study)
        # One sampler for all trials would draw the same random numbers again in the process that resumes the search.
        if self.sampler is None:
            self.study.sampler = optuna.samplers.TPESampler(seed=seed)
        leftovers = self.framework.watch()
        path = self.folder / _file_name(plain.number)
        to_beat = None if best is None else best.value
        trial = Trial(plain, seed, to_beat, lambda model: self.framework.write(model, path))
        self.framework.seed(seed)
        started = time.perf_counter()
        failure: BaseException | None = None
        outcome, error, score = FINISHED, "", math.nan
        try:
            score = trial.end(self.objective(trial))
        except Exception as raised:
            failure, error = raised, f"{type(raised).__name__}: {raised}".split("\n", 1)[0][:300]
            is_pruned = isinstance(raised, optuna.TrialPruned)
            outcome = PRUNED if is_pruned else OUT_OF_MEMORY if recognise(raised) else FAILED
        seconds = time.perf_counter() - started
        if failure is None and not math.isfinite(score):
            outcome, error = NO_SCORE, f"the score is {score}"
        # Everything of the trial must go before anyone looks for what is left of it.
        trial.drop()
        ends_search = failure if outcome == FAILED and self.on_error == "raise" else None
        if failure is not None and ends_search is None:
            clear_frames(failure)
        failure = None
        held = "" if ends_search is not None else leftovers()
        attributes = {"seconds": seconds, "memory_bytes": resident_bytes(), "held": held, "error": error}
        for name, value in {**attributes, "outcome": outcome}.items():
            plain.set_user_attr(name, value)
        if ends_search is not None:
            raise StepFailed(
                f"trial {plain.number} of the search failed with {plain.params}: {error}. The trials before it are "
                "kept; run the same search again to go on from here, or give on_error='skip' to leave out trials that "
                "fail."
            ) from ends_search
        if held:
            warnings.warn(f"trial {plain.number} of the search has ended, but {held}", UserWarning, stacklevel=2)
        if outcome == PRUNED:
            raise optuna.TrialPruned(error)
        if outcome != FINISHED:
            raise _Skipped(f"{outcome}: {error}")
        return score


class _Skipped(Exception):
    """A trial that counts as failed and doesn't end the search."""


def open_study(folder: Path, direction: str, pruner: optuna.pruners.BasePruner | None) -> optuna.Study:
    """The study in a folder, which is made where it isn't there."""
    path, wanted = folder / JOURNAL, StudyDirection[direction.upper()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            # Half a line at the end, left by a process that was killed, would spoil the line that is added next.
            text = path.read_bytes()
            os.truncate(path, text.rfind(b"\n") + 1)
        backend = JournalFileBackend(str(path), JournalFileOpenLock(str(path)))
        storage = optuna.storages.JournalStorage(backend)
        study = optuna.create_study(
            storage=storage, study_name=STUDY, direction=wanted, pruner=pruner, load_if_exists=True
        )
    except OSError as error:
        raise BadFile(
            f"the folder of the search, {str(folder)!r}, can't be used: {error.strerror or error}. "
            "Give a folder that can be written to."
        ) from error
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise BadFile(f"{str(path)!r} is damaged or no journal of a search: {error}. Give another folder.") from error
    if study.direction is not wanted:
        raise BadInput(
            f"{str(folder)!r} holds another search: its direction is {study.direction.name.lower()!r}, and not "
            f"{direction!r}. Give another folder."
        )
    return study


def _by_position(study: optuna.Study) -> dict[int, FrozenTrial]:
    """The trials by their place in the search; a trial that is run again takes the place of the one before."""
    trials = study.get_trials(deepcopy=False)
    return {trial.user_attrs["position"]: trial for trial in trials if "position" in trial.user_attrs}


def _best(study: optuna.Study) -> FrozenTrial | None:
    is_any = any(trial.state is TrialState.COMPLETE for trial in study.get_trials(deepcopy=False))
    return study.best_trial if is_any else None


def _file_name(number: int) -> str:
    return f"trial-{number:04d}.safetensors"


def _number(value: Any, what: str) -> float:
    # A loss with its graph would warn.
    plain = value.detach() if hasattr(value, "detach") else value
    try:
        if not isinstance(plain, bool | str):
            return float(plain)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise BadInput(f"{what} {value!r}, but a score must be a number. Return a float, such as the validation loss.")


def _table(trials: tuple[FrozenTrial, ...], best: FrozenTrial | None) -> list[str]:
    names = list(dict.fromkeys(name for trial in trials for name in trial.params))
    rows = [["trial", *names, "score", "seconds", "memory after", ""]]
    for trial in trials:
        attributes = trial.user_attrs
        remarks = [
            "best" if best is not None and trial.number == best.number else "",
            attributes["outcome"] if attributes["outcome"] != FINISHED else "",
            "model not freed" if attributes["held"] else "",
        ]
        values = [trial.params.get(name, "-") for name in names]
        shown = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
        score = "-" if trial.value is None else f"{trial.value:.6g}"
        figures = [f"{attributes['seconds']:.1f}", format_size(attributes["memory_bytes"])]
        rows.append([str(trial.number), *shown, score, *figures, ", ".join(filter(None, remarks))])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]).rstrip() for row in rows]

"""What to try next when memory runs out, and when to try more again.

Memory of a pass grows with the elements of its micro-batch. So what was found out about one batch holds for others of
other shapes: the greatest number of elements that went well and the least that failed, for the moves in use. A failure
halves the micro-batch; when it can't be smaller, the next stronger moves are put on. Where parts of a batch don't
compute what the whole does (batch norm), the stronger moves come first. After many good steps a larger micro-batch is
tried once more, and where whole batches fit, the weaker moves, at longer and longer intervals where that fails: a
replay is all that it costs. What was found out is kept for the next run of the same model, shapes and device.
"""

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from memfit.core.errors import MemfitError
from memfit.core.guarding import BadCheckpoint, BatchSize, Fallbacks, MemoryFailure
from memfit.core.settings import OptimizerKernels, Settings, Weighting
from memfit.core.typed_data import Count, mismatch

# Sizes nearer to one that failed than this are not worth a replay.
_NEAR = 0.9
# More than any number of samples or elements.
_ANY = 2**62
_MAX_ENTRIES = 256
_FILE_VERSION = 1


@dataclass(slots=True)
class _Bounds:
    """What is known about micro-batches with some moves, in elements."""

    most: float | None = None  # of a micro-batch; None: the whole batch
    good: float = 0.0
    bad: float | None = None


class Attempts:
    """Chooses the settings of each step, from the first ones and the fallbacks that there are."""

    def __init__(self, first: Settings, fallbacks: Fallbacks | None = None) -> None:
        fallbacks = fallbacks or Fallbacks()
        self._base = first
        self._stronger = list(fallbacks.stronger)
        self._whole_first = fallbacks.whole_first
        self._one_size = fallbacks.one_size
        # Called at the first failure, and only then: settings that are expected to fit, or None.
        self.replan: Callable[[], Settings | None] | None = None
        self._level = 0
        self._bounds = _Bounds()
        self._planned_size = first.micro_batch_size
        self._good_steps = 0
        self._grow_after = fallbacks.grow_after
        self._trial: tuple[int, float | None] | None = None  # level and bound on trial, in place of what is known
        self._least = fallbacks.least_samples  # samples that a micro-batch must have
        self._update_failures = 0
        self.changed = False  # whether something was found out that is worth remembering

    @property
    def moves(self) -> Settings:
        """The settings in use, but for the micro-batch."""
        level, _ = self._in_use
        return replace(self._base, **(self._stronger[level - 1] if level else {}))

    @property
    def _in_use(self) -> tuple[int, float | None]:
        """The level of the moves, and the most elements of a micro-batch."""
        return self._trial or (self._level, self._bounds.most)

    def settings(self, size: BatchSize) -> Settings:
        """How to run a batch of this size now, or batches of all sizes where they have to be run alike."""
        if self._one_size and size.num_samples is not None:
            size = replace(size, num_samples=_ANY)
        return self._settings_of_one(size)

    def _settings_of_one(self, size: BatchSize) -> Settings:
        most = self._samples(size)
        if size.num_samples is None or most is None or most >= size.num_samples:
            return replace(self.moves, micro_batches=1, micro_batch_size=0)
        parts, most_parts = -(-size.num_samples // most), max(1, size.num_samples // self._least)
        if parts > most_parts:
            parts, most = most_parts, -(-size.num_samples // most_parts)
        return replace(self.moves, micro_batches=parts, micro_batch_size=0 if parts == 1 else most)

    def succeeded(self, size: BatchSize) -> None:
        """A step with a batch of this size went well."""
        self._update_failures = 0
        used = self._used(size)
        if self._trial is not None:
            level, most = self._trial
            if level != self._level:
                self._level, self._bounds = level, _Bounds()
            self._bounds.most, self._trial = most, None
            self.changed |= used is not None and used > self._bounds.good
        bounds = self._bounds
        bounds.good = max(bounds.good, used or 0.0)
        if bounds.bad is not None and bounds.good >= bounds.bad:
            # Others of the machine have given memory back.
            bounds.bad = None
        self._good_steps += 1
        if self._good_steps < self._grow_after:
            return
        if self._level and self._settings_of_one(size).micro_batches == 1:
            self._good_steps = 0
            self._trial = self._level - 1, bounds.most
        elif bounds.most is not None:
            self._good_steps = 0
            most, bad = bounds.most, bounds.bad
            # Near to what failed all is known; that is tried once more, for memory may have been given back.
            is_between = bad is not None and most < bad * _NEAR and most * 2 >= bad
            self._trial = self._level, (most + bad) / 2 if bad is not None and is_between else most * 2

    def failed(self, size: BatchSize, failure: MemoryFailure, *, in_update: bool, num_halvings: int = 1) -> bool:
        """A step ran out of memory; whether there is something else to try, which `settings` then gives.

        In the update smaller micro-batches don't help; elsewhere it takes at least so many halvings of them.
        """
        self.changed = True
        self._good_steps = 0
        if in_update:
            self._update_failures += 1
            # At first the same again: what ran out may be there again, and the same kernels give the same bits.
            is_single = self.moves.kernels is OptimizerKernels.SINGLE
            if self._update_failures > 1:
                self._base = replace(self._base, kernels=OptimizerKernels.SINGLE)
            return self._update_failures == 1 or not is_single
        used = self._used(size)
        if used is not None and self._in_use[0] == self._level:
            self._bounds.bad = min(used, self._bounds.bad or used)
        if self._trial is not None:
            # Back to what is known to be good, and longer until the next trial.
            self._trial = None
            self._grow_after *= 2
            return True
        if self.replan is not None:
            planned, self.replan = self.replan(), None
            if planned is not None and self.adopt(planned, size):
                return True
        if self._whole_first and self._strengthen():
            return True
        return self._shrink(size, num_halvings) or self._strengthen()

    def _used(self, size: BatchSize) -> float | None:
        if size.num_samples is None:
            return None
        most = self._samples(size)
        return min(size.num_samples, most or size.num_samples) * size.elements_per_sample

    def _samples(self, size: BatchSize) -> int | None:
        """Samples of a micro-batch; None: any number."""
        if self._planned_size:
            return self._planned_size
        _, most = self._in_use
        if most is None:
            # Parts of which only the number is given.
            parts = self._base.micro_batches
            return -(-size.num_samples // parts) if parts > 1 and size.num_samples else None
        return max(self._least, int(most / size.elements_per_sample + 1e-6))

    def need_samples(self, least: int) -> bool:
        """Micro-batches must have so many samples; False where that was known."""
        if self._least >= least:
            return False
        self._least = least
        return True

    def weigh(self, weighting: Weighting) -> None:
        """The losses of micro-batches add up in this way."""
        self._base = replace(self._base, weighting=weighting)

    def without_level(self) -> bool:
        """The stronger moves in use can't be put on this model; whether there were any."""
        level, _ = self._in_use
        if not level:
            return False
        del self._stronger[level - 1]
        self._level -= 1
        self._trial = None
        return True

    def adopt(self, planned: Settings, size: BatchSize) -> bool:
        """Goes on as planned; False where that is what is in use already."""
        if planned == self._settings_of_one(size):
            return False
        self._base = replace(planned, micro_batches=1, micro_batch_size=0)
        self._level = 0
        self._bounds = _Bounds(planned.micro_batch_size * size.elements_per_sample or None)
        self._trial = None
        self._planned_size = 0
        return True

    def _shrink(self, size: BatchSize, num_halvings: int) -> bool:
        now = self._samples(size) or size.num_samples
        if size.num_samples is None or now is None:
            return False
        now = min(now, size.num_samples)
        if now <= self._least:
            return False
        self._planned_size = 0
        self._bounds.most = max(self._least, -(-now // 2**num_halvings)) * size.elements_per_sample
        return True

    def _strengthen(self) -> bool:
        if self._level >= len(self._stronger):
            return False
        self._level += 1
        # What was good with weaker moves is good with these; what was bad need not be.
        self._bounds.bad = None
        return True

    # What lasts.

    def to_json(self) -> dict[str, Any]:
        """What was found out, for the next run."""
        return {
            "most": self._bounds.most,
            "good": self._bounds.good,
            "bad": self._bounds.bad,
            "level": self._level,
            "planned_size": self._planned_size,
            "least": self._least,
            "grow_after": self._grow_after,
            "good_steps": self._good_steps,
            "trial": None if self._trial is None else [*self._trial],
            # Checkpoints hold plain data, and names of enumerations are more than text.
            "base": json.loads(json.dumps(self._base.to_json())),
        }

    def load(self, data: dict[str, Any], *, resumes: bool = False) -> None:
        """Begins with what an earlier run found out, or goes on as the same run would have done where it `resumes`."""
        _check(data)
        self._base = replace(Settings.from_json(data["base"]), weighting=self._base.weighting)
        self._level = min(int(data["level"]), len(self._stronger))
        most, bad = data["most"], data["bad"]
        self._bounds = _Bounds(
            None if most is None else float(most), float(data["good"]), None if bad is None else float(bad)
        )
        self._planned_size = int(data.get("planned_size", 0))
        self._least = int(data.get("least", 1))
        self.replan = self._trial = None
        if not resumes:
            return
        self._grow_after = int(data.get("grow_after", self._grow_after))
        self._good_steps = int(data.get("good_steps", 0))
        trial = data.get("trial")
        if trial is not None:
            self._trial = min(int(trial[0]), self._level), None if trial[1] is None else float(trial[1])

    @staticmethod
    def check_progress(progress: dict[str, Any]) -> None:
        """Refuses the progress of a checkpoint that has something else than an update and findings."""
        problem = mismatch(progress.get("update"), Count, "update")
        if problem:
            raise BadCheckpoint(f"the checkpoint's progress is invalid: {problem}")
        if "attempts" not in progress:
            raise BadCheckpoint("the checkpoint's progress has no attempts")
        if progress["attempts"] is not None:
            _check(progress["attempts"])

    def bound(self, size: BatchSize, samples: int) -> None:
        """No micro-batch may have more samples than this, as a supervisor says."""
        self._planned_size = 0
        most = samples * size.elements_per_sample
        self._bounds.most = min(most, self._bounds.most or most)
        if self._trial is not None:
            # A trial that the supervisor had to end isn't repeated by the run that goes on.
            level, on_trial = self._trial
            self._trial = level, min(most, on_trial or most)

    # Between processes.

    def votes(self) -> list[int]:
        """What this process needs, as numbers of which the least counts for all: see `settle`."""
        level, most = self._in_use
        whole = _ANY if most is None else math.ceil(most)
        return [self._planned_size or _ANY, whole, -level, self.moves.kernels is not OptimizerKernels.SINGLE]

    def settle(self, least: Sequence[int]) -> None:
        """Takes over what the neediest of the processes needs."""
        planned, most, level, kernels = least
        if [planned, most, level] != self.votes()[:3]:
            self._planned_size = 0 if planned == _ANY else planned
            self._bounds.most = None if most == _ANY else float(most)
            self._level, self._trial = -level, None
        if not kernels:
            self._base = replace(self._base, kernels=OptimizerKernels.SINGLE)


class _Findings(TypedDict):
    """What `Attempts.to_json` writes."""

    most: Annotated[float, 0] | None
    good: Annotated[float, 0]
    bad: Annotated[float, 0] | None
    level: Count
    base: dict[str, Any]
    planned_size: NotRequired[Count]
    least: NotRequired[Annotated[int, 1]]
    grow_after: NotRequired[Annotated[int, 1]]
    good_steps: NotRequired[Count]
    trial: NotRequired[list[float | None] | None]


def _check(findings: Any) -> None:
    problem = mismatch(findings, _Findings)
    trial = None if problem else findings.get("trial")
    if trial is not None and (
        len(trial) != 2 or trial[0] is None or (trial[1] is None and trial[0] >= findings["level"])
    ):
        problem = "trial needs two numbers"
    try:
        if not problem and Settings.from_json(findings["base"]).step_in_backward:
            problem = "base.step_in_backward can't be undone, so no guard sets it"
    except (MemfitError, KeyError, TypeError, ValueError) as error:
        problem = str(error)
    if problem:
        raise BadCheckpoint(f"what was found out about memory can't be read: {problem}")


def key_of(parts: Iterable[object]) -> str:
    """One short name for everything that a finding depends on."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


class Ceilings:
    """The findings of earlier runs, in a small JSON file in a folder; without one nothing is kept.

    Its only use is to save time, so a file that can't be read counts as empty.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._path = None if folder is None else Path(folder, "ceilings.json")
        self._own: dict[str, dict[str, Any]] = {}

    def get(self, key: str, *, only_own: bool = False) -> dict[str, Any] | None:
        """What was found for this key, by `only_own` this object and not earlier runs; None: nothing."""
        finding = self._own.get(key)
        if finding is None and not only_own:
            finding = self._read().get(key)
        return dict(finding) if isinstance(finding, dict) else None

    def put(self, key: str, finding: dict[str, Any]) -> None:
        """Keeps a finding; the oldest go when there are many. Where it can't be written, later runs don't have it."""
        self._own[key] = finding
        if self._path is None:
            return
        entries = self._read()
        entries.pop(key, None)
        entries[key] = finding
        kept = dict(list(entries.items())[-_MAX_ENTRIES:])
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=".ceilings-")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump({"version": _FILE_VERSION, "entries": kept}, file)
                os.replace(temporary, self._path)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError:
            return

    def _read(self) -> dict[str, Any]:
        if self._path is None:
            return {}
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
            entries = data["entries"]
            return dict(entries) if data["version"] == _FILE_VERSION else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

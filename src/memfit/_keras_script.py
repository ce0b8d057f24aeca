"""A dry run of a script that trains with Keras: it runs until its first `fit`, and a step of that is estimated.

No device is simulated for the script, whose data and model are real; nothing is trained. It is run by `_child`, in a
process of its own.
"""

import runpy
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memfit._estimator import Estimator, as_job
from memfit.adapters.torch.imports import watch_imports
from memfit.core.dryrun import DryRun, Outcome, Request
from memfit.core.errors import MemfitError
from memfit.core.estimate import Estimate, Note
from memfit.core.replay import AllocatorOptions

if TYPE_CHECKING:
    from memfit.adapters.keras.dryrun import FirstBatch

_ESTIMATED = "keras-first-fit"


class KerasScriptRun:
    """One run of a script until its first `fit`.

    Args:
        request: the script and the device.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._first: FirstBatch | None = None

    def run(self) -> DryRun:
        """Runs the script and says what a step of its first `fit` needs."""
        started = time.perf_counter()
        watch_imports({"keras": self._watch})
        error: BaseException | None = None
        try:
            self._run_script()
        except BaseException as raised:
            error = raised
            if self._first is None and not isinstance(raised, SystemExit | KeyboardInterrupt):
                traceback.print_exception(raised)
        result = self._result(error)
        return replace(result, seconds=time.perf_counter() - started)

    def _watch(self, module: ModuleType) -> None:
        from memfit.adapters.keras.dryrun import end_at_fit

        def found(first: "FirstBatch") -> None:
            self._first = self._first or first

        end_at_fit(module, found)

    def _run_script(self) -> None:
        request = self._request
        sys.argv = [request.script, *request.arguments]
        if request.module:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(request.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(request.script).absolute().parent))
            runpy.run_path(request.script, run_name="__main__")

    def _result(self, error: BaseException | None) -> DryRun:
        request = self._request
        plain = DryRun(
            script=request.script,
            arguments=request.arguments,
            estimate=None,
            outcome=Outcome.NO_STEP,
            num_steps=0,
            steps_wanted=request.steps,
            num_devices=request.count,
        )
        if self._first is not None:
            return self._estimated(plain, self._first)
        if isinstance(error, KeyboardInterrupt):
            return replace(plain, outcome=Outcome.INTERRUPTED)
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
            return replace(plain, outcome=Outcome.FAILED if code else Outcome.NO_STEP, exit_code=code)
        if error is not None:
            return replace(plain, outcome=Outcome.FAILED, error=_said(error), exit_code=1)
        return replace(plain, error="the script called no `fit` of a Keras model", exit_code=0)

    def _estimated(self, plain: DryRun, first: "FirstBatch") -> DryRun:
        try:
            found = self._estimate(first)
        except MemfitError as error:
            return replace(plain, outcome=Outcome.FAILED, error=_said(error))
        outcome = Outcome.OUT_OF_MEMORY if found.fits is False else Outcome.COMPLETED
        return replace(plain, estimate=found, outcome=outcome, num_steps=1, steps_wanted=1)

    def _estimate(self, first: "FirstBatch") -> Estimate:
        job = as_job(first.model, (), None, _as_given(first.batch))
        found = Estimator(job, self._request.device, AllocatorOptions()).run()
        text = "the script ran until its first fit, of which a step was estimated; nothing was trained"
        return replace(found, notes=(*found.notes, Note(_ESTIMATED, text)))


def _as_given(batch: Any) -> Any:
    """The batch without the weights of samples that nobody gave."""
    parts = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    while len(parts) > 1 and parts[-1] is None:
        parts = parts[:-1]
    return parts


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

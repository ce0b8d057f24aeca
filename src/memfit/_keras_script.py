"""A dry run of a script that trains with Keras: it runs until its first step, which is estimated.

That is a step of the first `fit` or `train_on_batch`, or a turn of a loop that the script writes itself. No device is
simulated for the script, whose data and model are real; nothing is trained. It is run by `_child`, in a process of its
own.
"""

import runpy
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memfit._estimator import Estimator, as_job
from memfit.adapters.torch.imports import watch_imports
from memfit.core.dryrun import DryRun, Outcome, Request
from memfit.core.errors import MemfitError
from memfit.core.estimate import Estimate, Note
from memfit.core.job import Job
from memfit.core.replay import AllocatorOptions

if TYPE_CHECKING:
    from memfit.adapters.keras.dryrun import FirstBatch

_ESTIMATED = "keras-first-fit"
_FOLLOWED = "keras-first-turn"
_NO_STEP = (
    "the script called no `fit` or `train_on_batch` of a Keras model, and no loop of its own that computes gradients"
)
_NO_LOOPS = (
    "the script called no `fit` or `train_on_batch` of a Keras model. On PyTorch, loops of its own are followed on a "
    "simulated GPU: name one, such as --device t4"
)


class KerasScriptRun:
    """One run of a script until its first training step.

    Args:
        request: the script and the device.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._first: FirstBatch | None = None
        self._turn: Any = None
        self._loop: Any = None
        self._backend = ""

    def run(self) -> DryRun:
        """Runs the script and says what its first training step needs."""
        started = time.perf_counter()
        watch_imports({"keras": self._watch})
        error: BaseException | None = None
        try:
            self._run_script()
        except BaseException as raised:
            error = raised
        self._close(error)
        if isinstance(error, Exception) and not self._has_step:
            traceback.print_exception(error)
        result = self._result(error)
        return replace(result, seconds=time.perf_counter() - started)

    @property
    def _has_step(self) -> bool:
        return self._first is not None or self._turn is not None

    def _watch(self, module: ModuleType) -> None:
        from memfit.adapters.keras.dryrun import end_at_fit, follow_loops

        def found(first: "FirstBatch") -> None:
            self._first = self._first or first

        def turned(loop: Any) -> None:
            self._turn = self._turn or loop

        self._backend = str(module.backend.backend())
        end_at_fit(module, found)
        self._loop = follow_loops(turned)

    def _close(self, error: BaseException | None) -> None:
        """A turn that wasn't gone through to its end is better than none."""
        if self._loop is None or self._has_step or isinstance(error, KeyboardInterrupt):
            return
        from memfit.adapters.keras.dryrun import FirstTurn

        with suppress(FirstTurn):
            self._loop.close()

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
        if self._has_step:
            return self._estimated(plain, error)
        if isinstance(error, KeyboardInterrupt):
            return replace(plain, outcome=Outcome.INTERRUPTED)
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
            return replace(plain, outcome=Outcome.FAILED if code else Outcome.NO_STEP, exit_code=code)
        if isinstance(error, Exception):
            return replace(plain, outcome=Outcome.FAILED, error=_said(error), exit_code=1)
        return replace(plain, error=_NO_LOOPS if self._backend == "torch" else _NO_STEP, exit_code=0)

    def _estimated(self, plain: DryRun, error: BaseException | None) -> DryRun:
        try:
            found = self._estimate_batch(self._first) if self._first is not None else self._estimate_turn(error)
        except MemfitError as error:
            return replace(plain, outcome=Outcome.FAILED, error=_said(error))
        outcome = Outcome.OUT_OF_MEMORY if found.fits is False else Outcome.COMPLETED
        return replace(plain, estimate=found, outcome=outcome, num_steps=1, steps_wanted=1)

    def _estimate_batch(self, first: "FirstBatch") -> Estimate:
        job = as_job(first.model, (), None, _as_given(first.batch))
        found = Estimator(job, self._request.device, AllocatorOptions()).run()
        text = "the script ran until its first fit, of which a step was estimated; nothing was trained"
        return replace(found, notes=(*found.notes, Note(_ESTIMATED, text)))

    def _estimate_turn(self, error: BaseException | None) -> Estimate:
        from memfit.adapters.keras.dryrun import OpenLoop

        device = self._request.device
        tracer = OpenLoop(self._turn, device, self._request.script)
        found = Estimator(Job(None), device, AllocatorOptions(), tracer=tracer).run()
        text = "the script ran until its own training loop, of which one turn was estimated; nothing was trained"
        if isinstance(error, Exception):
            text += f". The turn ended early, with {_said(error)}: what came before it is counted"
        return replace(found, notes=(*found.notes, Note(_FOLLOWED, text)))


def _as_given(batch: Any) -> Any:
    """The batch without the weights of samples that nobody gave."""
    if not isinstance(batch, tuple | list):
        return batch
    parts = tuple(batch)
    while len(parts) > 1 and parts[-1] is None:
        parts = parts[:-1]
    return parts


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

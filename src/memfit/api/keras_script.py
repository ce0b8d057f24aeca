"""A dry run of a script that trains with Keras: it runs until its first step, which is estimated.

That is a step of the first `fit` or `train_on_batch`, or a turn of a loop that the script writes itself. No device is
simulated for the script, whose data and model are real; nothing is trained.
"""

import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memfit.api.jobs import as_job, open_estimator
from memfit.core.device import Kind
from memfit.core.dryrun import DryRun, Outcome, Request
from memfit.core.errors import MemfitError
from memfit.core.estimate import Estimate, Note
from memfit.core.job import Job
from memfit.core.printing import printable_traceback
from memfit.core.replay import AllocatorOptions
from memfit.core.user_code import run_program
from memfit.estimator.estimator import Estimator
from memfit.frameworks.torch.shapes.imports import watch_imports

if TYPE_CHECKING:
    from memfit.frameworks.keras.script.dryrun import FirstBatch

_ESTIMATED = "keras-first-fit"
_FOLLOWED = "keras-first-turn"
_NO_STEP = (
    "the script called no `fit` or `train_on_batch` of a Keras model, and has no custom loop that computes gradients"
)
_NO_LOOPS = (
    "the script called no `fit` or `train_on_batch` of a Keras model. On PyTorch, custom loops are traced on a "
    "simulated GPU: name one, such as --device t4"
)
# What sends a script to the simulated GPU, as the user is told.
_BACKEND = "the script's Keras runs on PyTorch"
_UPDATES = "the script updates a PyTorch module, and no Keras model so far"
_ASKS_FOR_GPU = "the script failed without a GPU for PyTorch"
# A script may prepare something with PyTorch before it trains with Keras; one that goes on is not trained in earnest.
_MOST_UPDATES = 20


class OnPyTorch(BaseException):
    """Ends a script that turns out to train with PyTorch."""


@dataclass(eq=False)
class KerasScriptRun:
    """One run of a script until its first training step."""

    _request: Request
    _first: "FirstBatch | None" = None
    _turn: Any = None
    _loop: Any = None
    _backend: str = ""
    _on_torch: str = ""
    _num_updates: int = 0
    _updates: Any = None

    def run(self) -> DryRun:
        """Runs the script and says what its first training step needs."""
        started = time.perf_counter()
        watch_imports({"keras": self._watch, "torch": self._watch_torch})
        request, error = self._request, None
        try:
            run_program(request.script, request.arguments, module=request.module)
        except BaseException as raised:
            error = raised
        if self._updates is not None:
            self._updates.remove()
        if self._loop is not None and self._backend == "torch":
            self._loop.close()
        elif self._loop is not None and not self._has_step and not isinstance(error, KeyboardInterrupt):
            from memfit.frameworks.keras.script.dryrun import FirstTurn

            # A turn that wasn't gone through to its end is better than none.
            with suppress(FirstTurn):
                self._loop.close()
        if self._has_step or isinstance(error, KeyboardInterrupt):
            self._on_torch = ""
        elif not self._on_torch and self._is_simulated and _asks_for_gpu(error):
            self._on_torch = _ASKS_FOR_GPU
        if isinstance(error, Exception) and not self._has_step and not self._on_torch:
            print(printable_traceback(error), end="", file=sys.stderr)
        result = self._result(error)
        return replace(result, seconds=time.perf_counter() - started)

    @property
    def on_torch(self) -> str:
        """Why the script, which has ended, is to run on a simulated GPU; "" where it is not."""
        return self._on_torch

    @property
    def _is_simulated(self) -> bool:
        return self._request.device.kind is Kind.CUDA

    @property
    def _has_step(self) -> bool:
        return self._first is not None or self._turn is not None

    def _watch(self, module: ModuleType) -> None:
        from memfit.frameworks.keras.script.dryrun import end_at_fit, follow_loops

        def found(first: "FirstBatch") -> None:
            self._first = self._first or first

        def turned(loop: Any) -> None:
            self._turn = self._turn or loop

        self._backend = str(module.backend.backend())
        if self._backend == "torch" and self._is_simulated:
            self._on_torch = _BACKEND
            raise OnPyTorch(_BACKEND)
        end_at_fit(module, found)
        self._loop = follow_loops(turned)

    def _watch_torch(self, module: ModuleType) -> None:
        def updated() -> None:
            self._on_torch = _UPDATES
            self._num_updates += 1
            if self._num_updates > _MOST_UPDATES and not self._has_step:
                raise OnPyTorch(_UPDATES)

        if self._is_simulated:
            from memfit.frameworks.torch.script.steps import call_before_updates

            self._updates = call_before_updates(updated)

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
            try:
                estimate = self._estimate(error)
            except MemfitError as problem:
                return replace(plain, outcome=Outcome.FAILED, error=_said(problem))
            outcome = Outcome.OUT_OF_MEMORY if estimate.fits is False else Outcome.COMPLETED
            return replace(plain, estimate=estimate, outcome=outcome, num_steps=1, steps_wanted=1)
        match error:
            case KeyboardInterrupt():
                return replace(plain, outcome=Outcome.INTERRUPTED)
            case SystemExit(code=code):
                exit_code = code if isinstance(code, int) else 0 if code is None else 1
                return replace(plain, outcome=Outcome.FAILED if exit_code else Outcome.NO_STEP, exit_code=exit_code)
            case Exception():
                return replace(plain, outcome=Outcome.FAILED, error=_said(error), exit_code=1)
        return replace(plain, error=_NO_LOOPS if self._backend == "torch" else _NO_STEP, exit_code=0)

    def _estimate(self, error: BaseException | None) -> Estimate:
        device = self._request.device
        if self._first is not None:
            batch = self._first.batch
            if isinstance(batch, tuple | list):
                # Without the weights of samples, where nobody gave any.
                batch = tuple(batch)
                while len(batch) > 1 and batch[-1] is None:
                    batch = batch[:-1]
            estimate = open_estimator(as_job(self._first.model, (), None, batch), device).run()
            code = _ESTIMATED
            text = "the script ran up to its first fit; one step of it was estimated, and nothing was trained"
        else:
            from memfit.frameworks.keras.script.dryrun import OpenLoop

            tracer = OpenLoop(self._turn, device, self._request.script)
            estimate = Estimator(Job(None), device, AllocatorOptions(), tracer, "Keras").run()
            code = _FOLLOWED
            text = "the script ran up to its training loop; one iteration was estimated, and nothing was trained"
            if isinstance(error, Exception):
                text += f". The iteration ended early with {_said(error)}: what ran before is counted"
        return replace(estimate, notes=(*estimate.notes, Note(code, text)))


def _asks_for_gpu(error: BaseException | None) -> bool:
    """Whether a script ended because PyTorch has no GPU: by PyTorch's own exception, or a check of the script's."""
    if error is None or "torch" not in sys.modules:
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return "cuda" in f"{error} {frames[-1].line if frames else ''}".lower()


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

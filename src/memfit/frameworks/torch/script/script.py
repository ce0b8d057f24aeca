"""Runs a user's script, unmodified, in a session, and says how it went.

The script is run as Python would run it: as `__main__`, with its own arguments and its own folder first on the path.
Whatever it does, what has been seen until then is told.
"""

import atexit
import importlib.util
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from memfit.allocator.live import LiveAllocator
from memfit.allocator.shared import SharedDevice
from memfit.core.dryrun import DryRun, Outcome, ProgramFacts, Request, Scan
from memfit.core.patching import Replacement, around
from memfit.core.printing import printable, printable_traceback, without_own_frames
from memfit.core.redirected_files import RedirectedFiles
from memfit.core.settings import Settings
from memfit.core.user_code import run_program
from memfit.frameworks.torch.apply.script_settings import ScriptSettings
from memfit.frameworks.torch.kernels import fallbacks
from memfit.frameworks.torch.kernels.assumed_values import MADE_UP
from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators
from memfit.frameworks.torch.script.checkpoints import Checkpoints
from memfit.frameworks.torch.script.launchers import LaunchedProgram
from memfit.frameworks.torch.script.loaders import Arrivals, Loaders
from memfit.frameworks.torch.script.processes import (
    ENDED_IDLE,
    ExitFunctions,
    Processes,
    interrupt_when_idle,
    wait_for_others,
)
from memfit.frameworks.torch.script.session import Session, leave
from memfit.frameworks.torch.script.shared_tensors import sharing
from memfit.frameworks.torch.script.steps import EndOfRun
from memfit.frameworks.torch.shapes import failures
from memfit.frameworks.torch.shapes.imports import on_import
from memfit.frameworks.torch.simulation import distributed

# Devices that a process of the script may name, however many are simulated: one for each process.
_MANY = 1024
# How long a script that has ended may take to clear up, after it has waited for its processes.
_CLEARING_SECONDS = 150.0


class ScriptRun:
    """One run of a script; `configure` is as for `Session`."""

    def __init__(
        self,
        request: Request,  # the script and the device
        memory: LiveAllocator,  # what the device can give
        configure: Callable[[Callable[[str], None]], None] = lambda report: None,
        shared: SharedDevice | None = None,  # the device as processes of the script share it; None: they see none
        *,
        files: RedirectedFiles | None = None,  # where Python's functions on files have stand-ins
        write_process: Callable[[DryRun], None] = lambda result: None,  # writes the result of a process of the script
    ) -> None:
        self._request = request
        self._shared = shared
        self._write_process = write_process
        settings = request.settings or Settings(set_to_none=False)
        parts = settings.micro_batches
        self._fitting = ScriptSettings(replace(settings, micro_batches=parts if request.accumulates else 1))
        ordinal = request.loader_ordinal
        self.loaders = Loaders(request.scan, ordinal if request.largest_first else None, parts, split=ordinal)
        self.session = Session(
            request.device,
            memory,
            count=request.count,
            steps=request.steps,
            settled=self._settle,
            configure=configure,
            fitting=self._fitting,
            watch=request.watch,
            compiles=request.compiles,
        )
        simulation = self.session.simulation
        report = simulation.notes.report
        line, num_steps = lambda: self.session.origin.user_line()[0], lambda: self.session.counter.num_steps
        self._arrivals = Arrivals(line, num_steps, parts, request.batch_lines, request.batch_size)
        simulation.device_view.on_arrival = self._arrivals
        self._checkpoints = Checkpoints(
            files,
            report,
            simulation.device_view.put,
            simulation.labels.of,
            num_ranks=request.count,
        )
        self._program = LaunchedProgram(request.script, request.module, request.arguments)
        # What ended a script in the place of its launcher, before the launcher's frames were added.
        self._in_place: tuple[BaseException, TracebackType | None] | None = None
        self.session.launchers.run = self._run_in_place
        self._processes = Processes(report, shared is not None, leave, self._process_started)
        self.session.on_fork = self._stay
        self._exit_functions = ExitFunctions()
        self._started = time.perf_counter()
        self._until_end = ExitStack()
        self._leave: Callable[[DryRun], None] | None = None

    def leave_with(self, leave: Callable[[DryRun], None]) -> None:
        """`leave` ends the process where the script catches every exception, its own end included."""

        def leave_once(result: DryRun) -> None:
            self._leave = None
            leave(result)

        self._leave = leave_once
        self.session.counter.ignored = lambda: leave_once(self._result(EndOfRun()))

    def follow(self) -> None:
        """Simulates from now on in this process, which a script has started."""
        end = self._end_as_process()

        def failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            plain_hook(kind, error, trace)
            end(error)

        plain_hook, sys.excepthook = sys.excepthook, failed
        # Before what the program registers, and so after it.
        atexit.register(end, None)
        # Until the process ends.
        self.session.devices.assumed = _MANY
        self._until_end.enter_context(self._simulated())

    def _end_as_process(self) -> Callable[[BaseException | None], None]:
        """Ends this process of the script's, once; after its last step already: one of a pool waits for more work."""
        is_over = False

        def end(error: BaseException | None) -> None:
            nonlocal is_over
            if is_over:
                return
            is_over, has_ended = True, self.session.counter.has_ended
            result = self._result(EndOfRun() if has_ended else error)
            if result.num_steps or result.failures or (result.estimate is not None and result.estimate.timeline.blocks):
                self._write_process(result)
            if self._shared is not None:
                self._shared.note(result.num_steps, self.session.recorder.num_ticks, has_ended or bool(result.failures))
                if has_ended:
                    wait_for_others(self._shared)
                self._shared.end()

        self._processes.ended = end
        self.session.counter.ended = lambda: end(None)
        # One of a pool ends its next task, too. To leave in the script's place is not for a process that it forked off.
        self.session.counter.ignored = lambda: None
        return end

    def _stay(self) -> bool:
        """Whether this process, which was just forked off, goes on with the device: CUDA allows it before its use."""
        if self._shared is None or not self._processes.forking:
            return False
        self._shared = shared = self._shared.again(self._processes.forking)
        if self.session.recorder.num_ticks:
            shared.end()
            return False
        self.session.devices.assumed = _MANY
        self.session.memory.share(shared)
        self.session.devices.stay()
        self._end_as_process()
        return True

    def _process_started(self) -> None:
        def end() -> None:
            self.session.counter.has_ended = True
            text = "it did nothing after its processes had taken their steps, and was ended: what follows was not run"
            self.session.simulation.notes.report(ENDED_IDLE, text)

        if self._shared is not None:
            self._shared.expect(1)
            if self._processes.num_started == 1:
                interrupt_when_idle(self._shared.have_taken_steps, end)

    def _settle(self) -> None:
        """A step has been taken."""
        self.loaders.settle()
        if self._shared is not None:
            self._shared.note(self.session.counter.num_steps, self.session.recorder.num_ticks, has_ended=False)

    @contextmanager
    def _simulated(self) -> Iterator[None]:
        simulation = self.session.simulation
        parts = (self.loaders, self._checkpoints, self._processes, self._exit_functions)
        replacements = [*(each for part in parts for each in part.replacements()), _tracebacks(), self._at_once()]
        if self._shared is not None:
            replacements += distributed.spawn_replacements(simulation.notes.report, self.session.devices)
        with (
            on_import({"torchvision": define_missing_operators}, {}),
            sharing(simulation.labels.is_simulated, self.session.recorder.add_foreign),
            self.session.running(replacements),
            simulation.with_stand_ins(),
        ):
            yield

    def _at_once(self) -> Replacement:
        """A script that ends without Python's own end leaves what has been seen; a process forked off it does not."""
        script = os.getpid()

        def leave_at_once(plain: Callable[[int], None], code: int) -> None:
            if self._leave is not None and os.getpid() == script:
                self._leave(self._result(SystemExit(code)))
            plain(code)

        return around(os, "_exit", leave_at_once)

    def run(self) -> DryRun:
        """Runs the script and says how it went."""
        self._started = time.perf_counter()
        error: BaseException | None = None
        for name, value in distributed.environment(self._request.count).items():
            os.environ.setdefault(name, value)
        with self._simulated():
            _seed()
            try:
                run_program(self._program.script, self._program.arguments, module=self._program.module)
            except BaseException as raised:
                error = raised
            if self._in_place is not None:
                # A launcher makes something of its own of what ended the script.
                error = self._in_place[0].with_traceback(self._in_place[1])
            if error is not None:
                if isinstance(error, Exception) and not self.session.counter.has_ended:
                    print(printable_traceback(error), end="", file=sys.stderr)
                elif isinstance(error, SystemExit) and isinstance(error.code, str):
                    print(printable(error.code, keep="\n\t"), file=sys.stderr)
            self._clear_up(error)
        return self._result(error)

    def _clear_up(self, error: BaseException | None) -> None:
        """Ends what the script has left; with what is known where that takes too long: threads and processes may."""
        leave = self._leave
        timer = threading.Timer(_CLEARING_SECONDS, lambda: leave and leave(self._result(error)))
        timer.daemon = True
        timer.start()
        try:
            if self._processes.num_started:
                if self._shared is not None and isinstance(error, EndOfRun):
                    wait_for_others(self._shared, self._processes.num_alive)
                if self.session.counter.has_ended or isinstance(error, KeyboardInterrupt):
                    self._processes.finish()
            self._exit_functions.run()
        finally:
            timer.cancel()

    def _run_in_place(self, program: LaunchedProgram) -> None:
        """Runs what a launcher was to start in the place of the launcher."""
        self._program = program
        self.session.replace_late(self._checkpoints.of_ranks())
        try:
            run_program(program.script, program.arguments, module=program.module)
        except BaseException as error:
            self._in_place = error, error.__traceback__
            raise

    def _result(self, error: BaseException | None) -> DryRun:
        request, session = self._request, self.session
        seconds = time.perf_counter() - self._started
        num_steps = session.counter.num_steps or session.counter.num_passes
        outcome, exit_code = self._outcome(error, num_steps)
        survived = outcome in (Outcome.COMPLETED, Outcome.ENDED, Outcome.NO_STEP)
        text = "" if survived or error is None else failures.one_line(error)
        if outcome is Outcome.NO_STEP and self._processes.num_started and self._shared is None:
            text = (
                "it started other processes, and what those do on the device is not simulated. "
                "Let it train in its own process, with --count for several devices"
            )
        suspicion, scan, compiler_failed = "", None, False
        if outcome is Outcome.FAILED and error is not None:
            notes = session.simulation.notes.found.values()
            made_up = [note.source for note in notes if note.code in (fallbacks.STAND_IN, MADE_UP)]
            suspicion = failures.suspicion(error, made_up)
            compiler_failed = session.compiled.has_begun and failures.is_of_compiler(error)
        if request.largest_first:
            no_loader = "the script reads no torch.utils.data.DataLoader for its steps"
            scan = self.loaders.scan() or Scan(problem=no_loader)
        program, died = self._program, outcome is Outcome.OUT_OF_MEMORY
        return DryRun(
            script=program.script,
            arguments=program.arguments,
            estimate=session.estimate(os.path.basename(program.script), seconds, died=died),
            outcome=outcome,
            num_steps=num_steps,
            steps_wanted=request.steps,
            num_devices=session.devices.installed,
            failures=tuple(session.marked_failures(survived=survived)),
            error=text,
            suspicion=suspicion,
            exit_code=exit_code,
            scan=scan,
            seconds=seconds,
            allocator=session.memory.options,
            seen=self._seen(),
            module=program.module,
            compiler_failed=compiler_failed,
        )

    def _seen(self) -> ProgramFacts | None:
        if not self._request.watch and self._request.settings is None:
            return None
        has_loader = self.loaders.training is not None
        return replace(
            self.session.seen,
            batch_size=self.loaders.batch_size if has_loader else self._arrivals.batch_size,
            batch_lines=() if has_loader else self._arrivals.lines,
            autocast=self.session.simulation.autocast.was_used,
            recomputed=tuple(sorted(self._fitting.recomputed)),
        )

    def _outcome(self, error: BaseException | None, num_steps: int) -> tuple[Outcome, int | None]:
        if isinstance(error, EndOfRun) or (isinstance(error, KeyboardInterrupt) and self.session.counter.has_ended):
            return Outcome.COMPLETED, None
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            if not num_steps and self.session.unrecovered:
                # It caught every error, and still got nowhere.
                return Outcome.OUT_OF_MEMORY, 0
            return (Outcome.ENDED if num_steps else Outcome.NO_STEP), 0
        exit_code = 1 if not isinstance(error, SystemExit) or not isinstance(error.code, int) else error.code
        # A script may have wrapped the error in one of its own, or have said so itself and ended.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, torch.OutOfMemoryError):
            cause = cause.__cause__ or cause.__context__
        if self.session.unrecovered and (isinstance(error, SystemExit) or cause is not None):
            return Outcome.OUT_OF_MEMORY, exit_code
        return Outcome.FAILED, exit_code


def _seed() -> None:
    """The same script is to do the same every time, unless it sets seeds of its own."""
    random.seed(0)
    torch.manual_seed(0)
    if importlib.util.find_spec("numpy") is not None:
        import numpy

        numpy.random.seed(0)


def _tracebacks() -> Replacement:
    """Tracebacks are written without our own frames, whoever writes them: `multiprocessing` does in a process."""

    def init(plain: Callable[..., None], self: traceback.TracebackException, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self.stack = without_own_frames(self.stack)

    return around(traceback.TracebackException, "__init__", init)

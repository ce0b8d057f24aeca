"""Runs a user's script, unmodified, in a session, and says how it went.

The script is run as Python would run it: as `__main__`, with its own arguments and its own folder first on the path.
Whatever it does, what has been seen until then is told.
"""

import atexit
import importlib.util
import os
import random
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType

import torch

from memfit.adapters.torch import distributed, failures, fallbacks
from memfit.adapters.torch.arrivals import Arrivals
from memfit.adapters.torch.checkpoints import Checkpoints
from memfit.adapters.torch.cuda_memory import DeviceMemory
from memfit.adapters.torch.draws import MADE_UP
from memfit.adapters.torch.exit_functions import ExitFunctions
from memfit.adapters.torch.fitting.from_outside import FromOutside
from memfit.adapters.torch.imports import on_import
from memfit.adapters.torch.launchers import Program
from memfit.adapters.torch.loaders import Loaders
from memfit.adapters.torch.origin import HIDDEN_FOLDERS
from memfit.adapters.torch.processes import (
    ENDED_IDLE,
    Processes,
    SharedDevice,
    interrupt_when_idle,
    wait_for_others,
)
from memfit.adapters.torch.session import Session, leave
from memfit.adapters.torch.shared_tensors import sharing
from memfit.adapters.torch.steps import EndOfRun
from memfit.adapters.torch.torchvision_operators import define_missing_operators
from memfit.core.dryrun import DryRun, Outcome, Request, Scan, Seen
from memfit.core.printing import printable

# Devices that a process of the script may name, however many are simulated: one for each process.
_MANY = 1024
# How long a script that has ended may take to clear up, after it has waited for its processes.
_CLEARING_SECONDS = 150.0


class ScriptRun:
    """One run of a script.

    Args:
        request: the script and the device.
        memory: what the device can give.
        configure: called before the first allocation, when the script has had its chance to set the allocator, with
            what takes a sentence about each setting that isn't simulated.
        shared: the device as it is shared with processes that the script starts; None: they see none.
        private_files: whether nobody but the script sees what it writes.
    """

    def __init__(
        self,
        request: Request,
        memory: DeviceMemory,
        configure: Callable[[Callable[[str], None]], None] = lambda report: None,
        shared: SharedDevice | None = None,
        *,
        private_files: bool = False,
    ) -> None:
        self._request = request
        self._shared = shared
        self._fitting = None
        if request.settings is not None:
            accumulated = request.settings.micro_batches if request.accumulates else 1
            self._fitting = FromOutside(replace(request.settings, micro_batches=accumulated))
        parts = 1 if request.settings is None else request.settings.micro_batches
        self.loaders = Loaders(
            request.scan,
            request.loader_ordinal if request.largest_first else None,
            parts=parts,
            split=request.loader_ordinal,
        )
        self.session = Session(
            request.device,
            memory,
            count=request.count,
            steps=request.steps,
            settled=self._settle,
            configure=configure,
            fitting=self._fitting,
            watch=request.watch,
        )
        report = self.session.simulation.notes.report
        simulation = self.session.simulation
        self._arrivals = simulation.look.on_arrival = Arrivals(
            lambda: self.session.origin.user_line()[0],
            lambda: self.session.counter.num_steps,
            parts=parts,
            split_at=request.batch_lines,
            batch_size=request.batch_size,
        )
        self._checkpoints = Checkpoints(
            request.checkpoint_folder or None,
            report,
            simulation.look.put,
            simulation.places.of,
            num_ranks=request.count,
            private=private_files,
        )

        self._program = Program(request.script, request.module, request.arguments)
        # What ended a script in the place of its launcher, before the launcher's frames were added.
        self._in_place: tuple[BaseException, TracebackType | None] | None = None
        self.session.launchers.run = self._run_in_place
        self._processes = Processes(report, are_simulated=shared is not None)
        self._processes.leave = leave
        self._processes.started = self._process_started
        self.session.on_fork = self._stay
        self._exit_functions = ExitFunctions()
        self.write_process: Callable[[DryRun], None] = lambda result: None
        """Writes the result of a process that was forked off."""
        self._started = time.perf_counter()
        self._until_end = ExitStack()
        self._leave: Callable[[DryRun], None] | None = None

    def leave_with(self, leave: Callable[[DryRun], None]) -> None:
        """`leave` ends the process where the script catches every exception, its own end included."""
        self._leave = leave
        self.session.counter.ignored = lambda: leave(self._result(EndOfRun(), time.perf_counter() - self._started))

    def follow(self, write: Callable[[DryRun], None]) -> None:
        """Simulates from now on in this process, which a script has started; `write` is given its result."""
        ended = False

        def end(error: BaseException | None) -> None:
            nonlocal ended
            if not ended:
                ended = True
                self._end_process(error, write)

        def failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            plain_hook(kind, error, trace)
            end(error)

        plain_hook, sys.excepthook = sys.excepthook, failed
        # Before what the program registers, and so after it.
        atexit.register(end, None)
        self._processes.ended = end
        # Until the process ends.
        self.session.devices.assumed = _MANY
        self._until_end.enter_context(self._simulated())

    def _end_process(self, error: BaseException | None, write: Callable[[DryRun], None]) -> None:
        if self.session.counter.has_ended:
            error = EndOfRun()
        result = self._result(error, time.perf_counter() - self._started)
        if result.num_steps or result.failures or (result.estimate is not None and result.estimate.timeline.blocks):
            write(result)
        if self._shared is not None:
            is_done = self.session.counter.has_ended or bool(result.failures)
            self._shared.note(result.num_steps, self.session.recorder.num_ticks, is_done)
            if self.session.counter.has_ended:
                wait_for_others(self._shared)
            self._shared.end()

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
        self._processes.ended = lambda error: self._end_process(error, self.write_process)
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
        self.loaders.settle()
        if self._shared is not None:
            self._shared.note(self.session.counter.num_steps, self.session.recorder.num_ticks, has_ended=False)

    @contextmanager
    def _simulated(self) -> Iterator[None]:
        report = self.session.simulation.notes.report
        answers = [
            *self.loaders.replacements(),
            *self._checkpoints.replacements(),
            *self._processes.replacements(),
            *self._exit_functions.replacements(),
            *([] if self._shared is None else distributed.spawn_replacements(report, self.session.devices)),
        ]
        simulation = self.session.simulation
        with (
            on_import({"torchvision": define_missing_operators}, {}),
            sharing(simulation.places.is_simulated, self.session.recorder.add_foreign),
            self.session.running(answers),
        ):
            yield

    def run(self) -> DryRun:
        """Runs the script and says how it went."""
        started = time.perf_counter()
        error: BaseException | None = None
        for name, value in distributed.environment(self._request.count).items():
            os.environ.setdefault(name, value)
        with self._simulated():
            _seed()
            try:
                self._run_script()
            except BaseException as raised:
                error = raised
            if self._in_place is not None:
                # A launcher makes something of its own of what ended the script.
                error = self._in_place[0].with_traceback(self._in_place[1])
            if error is not None:
                if isinstance(error, Exception) and not self.session.counter.has_ended:
                    _print_traceback(error)
                elif isinstance(error, SystemExit) and isinstance(error.code, str):
                    print(printable(error.code, keep="\n\t"), file=sys.stderr)
            with self._bounded(error):
                self._clear_up(error)
        self._checkpoints.finish()
        return self._result(error, time.perf_counter() - started)

    @contextmanager
    def _bounded(self, error: BaseException | None) -> Iterator[None]:
        """Leaves with what is known where clearing up after the script doesn't end: threads and processes may not."""
        if self._leave is None:
            yield
            return
        leave = self._leave
        timer = threading.Timer(
            _CLEARING_SECONDS, lambda: leave(self._result(error, time.perf_counter() - self._started))
        )
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _clear_up(self, error: BaseException | None) -> None:
        if self._processes.num_started:
            if self._shared is not None and isinstance(error, EndOfRun):
                wait_for_others(self._shared, self._processes.num_alive)
            if self.session.counter.has_ended or isinstance(error, KeyboardInterrupt):
                self._processes.finish()
        self._exit_functions.run()

    def _run_script(self) -> None:
        program = self._program
        sys.argv = [program.script, *program.arguments]
        if program.module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(program.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(program.script)))
            runpy.run_path(program.script, run_name="__main__")

    def _run_in_place(self, program: Program) -> None:
        """Runs what a launcher was to start in the place of the launcher."""
        self._program = program
        self.session.replace_late(self._checkpoints.of_ranks())
        try:
            self._run_script()
        except BaseException as error:
            self._in_place = error, error.__traceback__
            raise

    def _result(self, error: BaseException | None, seconds: float) -> DryRun:
        request, session = self._request, self.session
        num_steps = session.counter.num_steps or session.counter.num_passes
        outcome, exit_code = self._outcome(error, num_steps)
        survived = outcome in (Outcome.COMPLETED, Outcome.ENDED, Outcome.NO_STEP)
        return DryRun(
            script=self._program.script,
            arguments=self._program.arguments,
            estimate=session.estimate(
                os.path.basename(self._program.script), seconds, died=outcome is Outcome.OUT_OF_MEMORY
            ),
            outcome=outcome,
            num_steps=num_steps,
            steps_wanted=request.steps,
            num_devices=session.devices.installed,
            failures=tuple(session.marked_failures(survived=survived)),
            error=self._error(outcome, error),
            suspicion=self._suspicion(outcome, error),
            exit_code=exit_code,
            redirected={} if self._checkpoints.are_private else dict(self._checkpoints.redirected),
            scan=self._scan(),
            seconds=seconds,
            allocator=session.memory.options,
            seen=self._seen(),
            module=self._program.module,
        )

    def _seen(self) -> Seen | None:
        if not self._request.watch and self._fitting is None:
            return None
        return replace(
            self.session.seen,
            batch_size=self._arrivals.batch_size if self.loaders.training is None else self.loaders.batch_size,
            batch_lines=self._arrivals.lines if self.loaders.training is None else (),
            autocast=self.session.simulation.autocast.was_used,
            recomputed=() if self._fitting is None else tuple(sorted(self._fitting.recomputed)),
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
        if self.session.unrecovered and (isinstance(error, SystemExit) or _caused_by_full_device(error)):
            return Outcome.OUT_OF_MEMORY, exit_code
        return Outcome.FAILED, exit_code

    def _error(self, outcome: Outcome, error: BaseException | None) -> str:
        if outcome is Outcome.NO_STEP and self._processes.num_started and self._shared is None:
            return (
                "it started other processes, and what those do on the device is not simulated. "
                "Let it train in its own process, with --count for several devices"
            )
        survived = outcome in (Outcome.COMPLETED, Outcome.ENDED, Outcome.NO_STEP)
        if survived or error is None:
            return ""
        return failures.one_line(error)

    def _suspicion(self, outcome: Outcome, error: BaseException | None) -> str:
        if outcome is not Outcome.FAILED or error is None:
            return ""
        notes = self.session.simulation.notes.found.values()
        return failures.suspicion(error, [note.source for note in notes if note.code in (fallbacks.STAND_IN, MADE_UP)])

    def _scan(self) -> Scan | None:
        if not self._request.largest_first:
            return None
        return self.loaders.scan() or Scan(problem="the script reads no torch.utils.data.DataLoader for its steps")


def _caused_by_full_device(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _seed() -> None:
    """The same script is to do the same every time, unless it sets seeds of its own."""
    random.seed(0)
    torch.manual_seed(0)
    if importlib.util.find_spec("numpy") is not None:
        import numpy

        numpy.random.seed(0)


def _print_traceback(error: BaseException) -> None:
    """The traceback that Python would print, without our own frames."""
    shown = traceback.TracebackException.from_exception(error)
    _without_our_frames(shown)
    # What an exception says may come from anywhere: a file name, a label, a server.
    print(printable("".join(shown.format()), keep="\n\t"), end="", file=sys.stderr)


def _without_our_frames(shown: traceback.TracebackException | None) -> None:
    if shown is None:
        return
    ours = HIDDEN_FOLDERS[1]
    kept = [f for f in shown.stack if not f.filename.startswith(ours) and not f.filename.startswith("<frozen")]
    shown.stack = traceback.StackSummary.from_list(kept)
    _without_our_frames(shown.__cause__)
    _without_our_frames(shown.__context__)

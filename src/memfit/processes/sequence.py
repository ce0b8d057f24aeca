"""The runs that make up one dry run.

The first is the script as it is. Where it dies of the device's limit, a second on a device without one tells what it
would need. Where it doesn't and a scan was asked for, another begins with the largest of the loader's batches. What
could be changed about a script that doesn't fit is tried by running it with the change in force.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from memfit.core.dryrun import DryRun, Failure, Outcome, ProgramFacts, Request, Scan
from memfit.core.estimate import NOT_COMPILED, Estimate, Note
from memfit.core.settings import Settings
from memfit.core.timeline import Timeline
from memfit.processes.launch import Interrupted, run_child

_RAN = (Outcome.COMPLETED, Outcome.ENDED)
# In the first step the optimizer has no state yet.
_MIN_SCAN_STEPS = 2
_MAX_AHEAD = 1000
# With micro-batches every update takes so many passes, and all there is to see is there in the second.
_STEPS_OF_PARTS = 2


class NeedsPyTorch(Exception):
    """A script that was taken for one of Keras is to run on a simulated GPU; says why."""


@dataclass(frozen=True, slots=True)
class TooLarge:
    """A run whose peak is to be lowered."""

    estimate: Estimate  # of a device without a limit
    request: Request  # that run, knowing what it has seen of the script's batches
    seen: ProgramFacts  # what else it showed of the program


def dry_run(
    request: Request, *, quiet_output: bool = False, announce: Callable[[str], None] = lambda text: None
) -> tuple[DryRun, TooLarge | None]:
    """The dry run, and the run whose peak is to be lowered where something doesn't fit.

    Raises:
        Interrupted: the user interrupted it; has what was known by then.
        NeedsPyTorch: it was to run until its first step with Keras, took none, and uses PyTorch.
    """
    started = time.perf_counter()
    data = run_child(request, stdout_to_stderr=quiet_output)
    run = DryRun.from_json(data)
    if run.outcome is Outcome.FAILED and run.compiler_failed:
        announce("the script failed in code that was compiled on shapes: running it once more as eager")
        request = replace(request, compiles=False)
        again = run_child(request, stdout_to_stderr=quiet_output)
        eager = DryRun.from_json(again)
        # Where it fails all the same, it wasn't the compiler's doing.
        if eager.outcome is not Outcome.FAILED:
            data, run = again, _counted_as_eager(eager, run.error)
    too_large = None
    if request.until_fit and data.get("on_torch"):
        raise NeedsPyTorch(data["on_torch"])
    if request.until_fit:
        # A single step was estimated, and there is no more to see.
        return replace(run, seconds=time.perf_counter() - started), None
    try:
        if run.outcome is Outcome.OUT_OF_MEMORY:
            announce("running the script once more on a device without a limit, to see what it would need")
            run, too_large = _with_need(run, request)
            if request.scan:
                run = replace(run, scan=Scan(problem="the script's first batches don't fit already"))
        elif request.scan and run.outcome in _RAN:
            announce(f"running the script once more, from the largest of {request.scan} batches on")
            scan, too_large = _scan(replace(request, loader_ordinal=data.get("loader_ordinal")))
            run = replace(run, scan=scan)
    except KeyboardInterrupt:
        # What the first run found is worth more than what a further one had found by now.
        raise Interrupted(run) from None
    return replace(run, seconds=time.perf_counter() - started), too_large


def _counted_as_eager(run: DryRun, error: str) -> DryRun:
    """The run, with a note of why nothing of it is compiled."""
    if run.estimate is None:
        return run
    note = Note(NOT_COMPILED, f"the script failed with what torch.compile made of it, which counts as eager: {error}")
    return replace(run, estimate=replace(run.estimate, notes=(*run.estimate.notes, note)))


def run_with(
    request: Request, settings: Settings, num_steps: int, timeout_seconds: float | None = None
) -> DryRun | None:
    """The run of a script with settings in force; None where they could not be put into practice for whole steps.

    `request` is that of the plain run, and `num_steps` are the optimizer steps that it took.
    """
    many = settings.micro_batches > 1 and request.accumulates
    steps = min(_STEPS_OF_PARTS, request.steps) if many else request.steps
    wanted = replace(request, settings=settings, watch=False, steps=steps, unlimited=True)
    run = DryRun.from_json(run_child(wanted, silent=True, timeout_seconds=timeout_seconds))
    return None if settings.micro_batches > 1 and run.num_steps < min(steps, num_steps) else run


def peak_with(
    too_large: TooLarge, settings: Settings, num_steps: int, timeout_seconds: float, *, accumulates: bool = True
) -> int | None:
    """What the device must provide for a script with settings in force; None where that can't be found out.

    With `accumulates` micro-batches make up one update; each makes one of its own otherwise.
    """
    if settings.micro_batches > 1 and not too_large.request.splits:
        return None
    run = run_with(replace(too_large.request, accumulates=accumulates), settings, num_steps, timeout_seconds)
    if run is None or run.outcome not in _RAN or run.estimate is None:
        return None
    recomputed = () if run.seen is None else run.seen.recomputed
    return run.estimate.peak_bytes if set(settings.checkpoint) <= set(recomputed) else None


def _with_need(died: DryRun, request: Request) -> tuple[DryRun, TooLarge | None]:
    """The run with the estimate of an unlimited device, if that tells more, with the failure of the first."""
    request = replace(request, unlimited=True, watch=True)
    data = run_child(request, silent=True)
    free = DryRun.from_json(data)
    seen = free.seen or ProgramFacts()
    request = request.after(seen, data.get("loader_ordinal"))
    known, larger, fatal = died.estimate, free.estimate, died.fatal
    if larger is None or (known is not None and larger.peak_bytes <= known.peak_bytes):
        larger = known
    if larger is None or fatal is None:
        return replace(died, estimate=larger), None if larger is None else TooLarge(larger, request, seen)
    device = larger.device if known is None else known.device
    estimate = replace(larger, device=device, replay=replace(larger.replay, out_of_memory=fatal.out_of_memory))
    named = _classified(fatal, larger.timeline)
    run = replace(died, estimate=estimate, failures=tuple(named if f is fatal else f for f in died.failures))
    return run, TooLarge(estimate, request, seen)


def _classified(failure: Failure, timeline: Timeline) -> Failure:
    """The failure with its bytes by the categories of a run that went on, whose backward pass shows the activations."""
    live_bytes = sum(failure.by_category.values())
    curve = timeline.curve()
    first = max(0, failure.tick - 1)
    # A workspace that was left out for lack of memory is two ticks of the run that had enough, so that it is ahead.
    ticks = range(first, min(len(curve), first + _MAX_AHEAD))
    tick = next((tick for tick in ticks if curve[tick] == live_bytes), None)
    if tick is None:
        return failure
    return replace(failure, by_category=timeline.breakdown(tick, lambda block: str(block.category)))


def _scan(request: Request) -> tuple[Scan, TooLarge | None]:
    """How the batches vary and whether the largest fits; with what it needs where it doesn't."""
    request = replace(request, largest_first=True, steps=max(_MIN_SCAN_STEPS, request.steps))
    run = DryRun.from_json(run_child(request, silent=True))
    scan = run.scan
    if scan is None or scan.problem:
        return scan or Scan(problem=_why_not(run)), None
    if run.outcome is Outcome.OUT_OF_MEMORY:
        run, too_large = _with_need(run, request)
        peak_bytes = None if run.estimate is None else run.estimate.peak_bytes
        return replace(scan, fits=False, peak_bytes=peak_bytes, failure=run.fatal), too_large
    if run.outcome in _RAN and run.estimate is not None:
        return replace(scan, fits=run.fits, peak_bytes=run.estimate.peak_bytes), None
    return replace(scan, problem=_why_not(run)), None


def _why_not(run: DryRun) -> str:
    if run.error:
        return f"the script failed when it was run from the largest batch on: {run.error}"
    if run.outcome is Outcome.NO_STEP:
        return "the script took no step when it was run from the largest batch on"
    return "the script reads no torch.utils.data.DataLoader for its steps"

"""The runs that make up one dry run.

The first is the script as it is. Where it dies of the device's limit, a second on a device without one tells what it
would need. Where it doesn't and a scan was asked for, another begins with the largest of the loader's batches.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from memfit.core.dryrun import DryRun, Failure, Outcome, Request, Scan
from memfit.core.estimate import Estimate
from memfit.core.timeline import Timeline
from memfit.runs.launch import Interrupted, run_child

_RAN = (Outcome.COMPLETED, Outcome.ENDED)
# In the first step the optimizer has no state yet.
_MIN_SCAN_STEPS = 2
_MAX_AHEAD = 1000


def dry_run(
    request: Request, *, quiet_output: bool = False, announce: Callable[[str], None] = lambda text: None
) -> tuple[DryRun, Estimate | None]:
    """The dry run, and the estimate whose peak is to be lowered where something doesn't fit.

    Args:
        request: the script and the device.
        quiet_output: what the script prints goes to standard error.
        announce: told of every further run.

    Raises:
        Interrupted: the user interrupted it; has what was known by then.
    """
    started = time.perf_counter()
    data = run_child(request, stdout_to_stderr=quiet_output)
    run = DryRun.from_json(data)
    too_large = None
    try:
        if run.outcome is Outcome.OUT_OF_MEMORY:
            announce("running the script once more on a device without a limit, to see what it would need")
            run = _with_need(run, request)
            too_large = run.estimate
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


def read_run(request: Request, *, quiet_output: bool = False) -> DryRun:
    """The one run of a script of which a single step is estimated.

    Args:
        request: the script and the device.
        quiet_output: what the script prints goes to standard error.
    """
    started = time.perf_counter()
    run = DryRun.from_json(run_child(request, stdout_to_stderr=quiet_output))
    return replace(run, seconds=time.perf_counter() - started)


def _with_need(died: DryRun, request: Request) -> DryRun:
    """The run with the estimate of an unlimited device, in which the failure of the limited one is noted.

    Where that run tells no more than the limited one, what is known of the latter is all there is to know.
    """
    free = DryRun.from_json(run_child(replace(request, unlimited=True), silent=True))
    known, found, fatal = died.estimate, free.estimate, died.fatal
    if found is None or (known is not None and found.peak_bytes <= known.peak_bytes):
        found = known
    if found is None or fatal is None:
        return replace(died, estimate=found)
    device = found.device if known is None else known.device
    estimate = replace(found, device=device, replay=replace(found.replay, out_of_memory=fatal.out_of_memory))
    named = _classified(fatal, found.timeline)
    return replace(died, estimate=estimate, failures=tuple(named if f is fatal else f for f in died.failures))


def _classified(failure: Failure, timeline: Timeline) -> Failure:
    """The failure with its bytes by the categories of a run that went on: only then do activations show as such."""
    live_bytes = sum(failure.by_category.values())
    curve = timeline.curve()
    first = max(0, failure.tick - 1)
    # A workspace that was left out for lack of memory is two ticks of the run that had enough, so that it is ahead.
    ticks = range(first, min(len(curve), first + _MAX_AHEAD))
    tick = next((tick for tick in ticks if curve[tick] == live_bytes), None)
    if tick is None:
        return failure
    return replace(failure, by_category=timeline.breakdown(tick, lambda block: str(block.category)))


def _scan(request: Request) -> tuple[Scan, Estimate | None]:
    """How the batches vary and whether the largest fits; with its estimate where it doesn't."""
    request = replace(request, largest_first=True, steps=max(_MIN_SCAN_STEPS, request.steps))
    run = DryRun.from_json(run_child(request, silent=True))
    scan = run.scan
    if scan is None or scan.problem:
        return scan or Scan(problem=_why_not(run)), None
    if run.outcome is Outcome.OUT_OF_MEMORY:
        run = _with_need(run, request)
        peak_bytes = None if run.estimate is None else run.estimate.peak_bytes
        return replace(scan, fits=False, peak_bytes=peak_bytes, failure=run.fatal), run.estimate
    if run.outcome in _RAN and run.estimate is not None:
        return replace(scan, fits=run.fits, peak_bytes=run.estimate.peak_bytes), None
    return replace(scan, problem=_why_not(run)), None


def _why_not(run: DryRun) -> str:
    if run.error:
        return f"the script failed when it was run from the largest batch on: {run.error}"
    if run.outcome is Outcome.NO_STEP:
        return "the script took no step when it was run from the largest batch on"
    return "the script reads no torch.utils.data.DataLoader for its steps"

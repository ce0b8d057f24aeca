"""What every report says about a dry run, as text, in the terminal and on a page."""

import shlex
from typing import Any

from memfit.core.device import Origin
from memfit.core.dryrun import Advice, DryRun, Failure, Outcome, Scan
from memfit.core.errors import BadInput
from memfit.core.estimate import CACHED, CONTEXT, OTHER_PROCESSES, Estimate, Note
from memfit.core.timeline import Phase
from memfit.core.units import format_size
from memfit.reports.estimate import figures
from memfit.reports.estimate.figures import printable
from memfit.reports.estimate.payload import build_payload
from memfit.reports.parts import HARMLESS, KEEPS, Part, Report, note_line, shown_notes

NUM_TOP = 5
_REPORT = (
    "If it runs on a GPU, please report this to memfit's maintainers, with the traceback above, the lines of the "
    "script that it names, and the versions of memfit and of the framework (`memfit --version`, `pip list`)"
)
_NUM_LISTED = 3


def command(run: DryRun) -> str:
    """The script with its arguments, as it was started."""
    return printable(" ".join((run.script, *run.arguments)))


def verdict(run: DryRun) -> str:
    """The one line that answers the question."""
    script, target, fatal = printable(run.script), "the simulated device", run.fatal
    if run.estimate is not None:
        several = f"{run.num_devices} x " if run.num_devices > 1 else ""
        target = several + figures.device_title(run.estimate.device)
    if run.outcome is Outcome.OUT_OF_MEMORY:
        could = "could" if run.estimate is not None and figures.may_fit(run.estimate) else "would"
        return f"{script} {could} run out of memory on {target}{'' if fatal is None else ' ' + place(fatal)}"
    if run.outcome is Outcome.CRASHED:
        return f"{script} crashed: {printable(run.error)}"
    head = f"{script} on {target}: {_progress(run)}"
    if run.outcome is Outcome.FAILED:
        exit_code = "no exit code" if run.exit_code is None else f"exit code {run.exit_code}"
        reason = ", and the simulation may be the reason" if run.suspicion else " for a reason of its own"
        return f"{head} failed{reason}: {printable(run.error) or exit_code}"
    if _fits_until_then(run) is not None:
        return f"{head}, peak {_peak(run)}: {figures.answer(_fits_until_then(run))} as far as it went"
    if run.outcome in (Outcome.NO_STEP, Outcome.INTERRUPTED):
        return f"{head}, so whether it fits is unknown" + (f": {printable(run.error)}" if run.error else "")
    if run.is_off_device:
        return f"{head} and put nothing on the device, so whether it fits is unknown: does it move its model there?"
    peak = f"{head}, peak {_peak(run)}"
    if run.scan is not None and run.scan.fits is False:
        return f"{peak}: fits at step 1; {longest(run.scan)}, does not"
    return f"{peak}: {_answer(run)}"


def _answer(run: DryRun) -> str:
    """Whether it fits; how sure that is, where it was run to its end."""
    if run.fits and run.estimate is not None and run.estimate.fits:
        return figures.sure_answer(run.estimate)
    return figures.answer(run.fits)


def _fits_until_then(run: DryRun) -> bool | None:
    """Whether what a script without a step did fits; None where it did nothing on the device or says why it can't."""
    if run.outcome is not Outcome.NO_STEP or run.error or run.estimate is None or not run.estimate.timeline.blocks:
        return None
    return run.estimate.fits


def answer(run: DryRun) -> str:
    """The verdict in one or two words."""
    if run.outcome in (Outcome.FAILED, Outcome.CRASHED, Outcome.INTERRUPTED):
        return run.outcome.value
    return "no step taken" if run.outcome is Outcome.NO_STEP else _answer(run)


def details(run: DryRun) -> list[str]:
    """Lines below the verdict."""
    lines = []
    estimate = run.estimate
    if run.num_devices > 1:
        lines.append("all figures are those of one device")
    if _fits_until_then(run) is not None:
        lines.append("training was not seen: gradients and an optimizer's state, if there are any, are not in it")
    elif not is_whole(run) and estimate is not None and estimate.timeline.blocks:
        lines.append(f"until then: peak {_peak(run)} (simulated)")
    if run.suspicion:
        lines.append(f"{printable(run.suspicion)}. {_REPORT}")
    caught = [failure for failure in run.failures if failure.handled]
    if caught:
        times = "once" if len(caught) == 1 else f"{len(caught)} times"
        lines.append(f"the script ran out of memory {times}, caught the error and went on; first {place(caught[0])}")
    if run.fatal is not None:
        lines += failure_lines(run, run.fatal)
    if run.fatal is not None and estimate is not None and estimate.timeline.num_ticks > run.fatal.tick:
        lines += [need(estimate), f"that peak would be {printable(estimate.moment)}"]
    return lines


def place(failure: Failure) -> str:
    """Where and when an allocation failed."""
    return (f"at {printable(failure.source)}, " if failure.source else "") + moment(failure)


def moment(failure: Failure) -> str:
    """When an allocation failed."""
    return f"in step {failure.step}, {failure.phase}" if failure.phase is not Phase.SETUP else "in set-up"


def asked(run: DryRun, failure: Failure) -> str:
    """What was asked for, by whom, and what was free."""
    module = f" in {printable(failure.module)}" if failure.module else ""
    text = f"{printable(failure.op) or 'an allocation'}{module} asked for {format_size(failure.requested_bytes)}"
    cached = format_size(failure.reserved_bytes - failure.allocated_bytes)
    device_free, estimate = "", run.estimate
    if estimate is not None and estimate.capacity_bytes is not None:
        held_bytes = estimate.context_bytes + failure.reserved_bytes + failure.other_bytes
        device_free = f"{format_size(max(0, estimate.capacity_bytes - held_bytes))} free on the device, "
    return f"{text}: {device_free}{cached} unused in the allocator's cache (simulated)"


def failure_lines(run: DryRun, failure: Failure) -> list[str]:
    """The user's line, and what it asked for."""
    where = printable(failure.source) or "unknown line"
    return [f"{where}  {printable(failure.code.strip())}".rstrip(), asked(run, failure)]


def need(estimate: Estimate) -> str:
    """What an unlimited device would have to provide, beside what there is."""
    text = f"without a limit it would need {figures.needed(estimate)} (simulated)"
    capacity = estimate.capacity_bytes
    if capacity is None:
        return text
    usable = f"{format_size(capacity)} usable ({estimate.device.usable_origin.value})"
    over = estimate.peak_bytes - capacity
    return f"{text}: {format_size(over)} more than the {usable}" if over > 0 else f"{text}; {usable}"


def parts(run: DryRun) -> list[Part]:
    """Everything below the verdict and its lines."""
    estimate, fatal = run.estimate, run.fatal
    all_parts = []
    if fatal is not None:
        groups = failure_groups(run, fatal)
        rows = tuple(figures.rows(groups, sum(groups.values())))
        all_parts.append(Part(f"Held at that moment, {moment(fatal)}", rows=rows, with_bar=True))
    all_parts.append(Part("Batches of the script's loader", lines=tuple(scan_lines(run))))
    lines = []
    for number, advice in enumerate(run.advice, 1):
        lines += [f"{number}. {advice_title(advice, run)}", f"   {printable(advice.how)}"]
    lines += map(printable, advice_lines(run))
    all_parts.append(Part("Changes that would save most, each alone", lines=tuple(lines)))
    if estimate is not None and estimate.timeline.blocks:
        total, breakdown = estimate.peak_bytes, estimate.breakdown
        peak = "at the peak" if fatal is None else "at the peak without a limit"
        if fatal is None:
            # Of a script that died, the moment of its death is the one to look at.
            categories = tuple(figures.rows(breakdown.by_category, total))
            all_parts.append(Part(f"Peak {printable(estimate.moment)}", rows=categories, with_bar=True))
        for what, sizes in (("modules", breakdown.by_module), ("source lines", breakdown.by_source)):
            top = tuple(figures.top_rows(sizes, total, NUM_TOP))
            all_parts.append(Part(f"Largest {what} {peak} (top {NUM_TOP})", rows=top))
        title = f"Figures and their origin ({figures.parameters(estimate)} parameters)"
        lines = [f"{f.label:<34}{f.value:>20}" + (f"  {f.origin}" if f.origin else "") for f in run_figures(run)]
        all_parts.append(Part(title, lines=tuple(lines)))
    if len(run.processes) > 1:
        held = {printable(name): size for name, size in run.processes.items()}
        rows = tuple(figures.rows(held, sum(held.values())))
        all_parts.append(Part("Held by each process at the device's peak (simulated)", rows=rows))
    shown = list(run.redirected.items())[:_NUM_LISTED]
    lines = [printable(given) + (f" -> {printable(real)}" if real else "") for given, real in shown]
    if len(run.redirected) > _NUM_LISTED:
        lines.append(f"and {len(run.redirected) - _NUM_LISTED} more")
    if shown and not all(run.redirected.values()):
        lines.append("They were not kept; --keep-checkpoints FOLDER keeps them")
    all_parts.append(Part("Files that went elsewhere, so that yours were not overwritten", lines=tuple(lines)))
    all_parts.append(Part("Notes", lines=tuple(note_lines(run))))
    return [part for part in all_parts if part.holds_something]


def run_figures(run: DryRun) -> list[figures.Figure]:
    """The figures of the run's estimate that are known; an interval only where the whole of the steps was run."""
    if run.estimate is None:
        return []
    # A script's host memory is real, and its own affair.
    hidden = {"host memory"} if not run.estimate.host.parts else set()
    if not is_whole(run):
        hidden.add(figures.INTERVAL)
    return [figure for figure in figures.figures(run.estimate) if figure.label not in hidden]


def is_whole(run: DryRun) -> bool:
    """Whether the estimate is that of whole steps, and not of a run that broke off."""
    return run.outcome in (Outcome.COMPLETED, Outcome.ENDED, Outcome.OUT_OF_MEMORY)


def failure_groups(run: DryRun, failure: Failure) -> dict[str, int]:
    """What held the device's memory when an allocation failed, with what the allocator and the context take."""
    held = sum(failure.by_category.values())
    context = 0 if run.estimate is None else run.estimate.context_bytes
    rest = {CACHED: failure.reserved_bytes - held, CONTEXT: context, OTHER_PROCESSES: failure.other_bytes}
    return failure.by_category | {name: size for name, size in rest.items() if size > 0}


def advice_lines(run: DryRun) -> list[str]:
    """What to do where no change is enough alone: the command that looks for a combination; empty otherwise."""
    capacity = None if run.estimate is None else run.estimate.capacity_bytes
    if run.estimate is None or capacity is None or run.fits is not False:
        return []
    enough = [advice.origin for advice in run.advice if advice.peak_bytes <= capacity]
    if Origin.SIMULATED in enough:
        return []
    count = ["--count", str(run.num_devices)] if run.num_devices > 1 else []
    script = ["--script", *(["-m"] if run.module else []), run.script, *run.arguments]
    device = run.estimate.device
    stack = [] if device.stack is None or device.stack.is_installed else ["--stack", device.stack.text]
    words = ["memfit", "plan", "--device", device.name, *stack, *count, *script]
    many = "none of these is sure to be enough alone; " if enough else "none of these is enough alone; "
    many = many if run.advice else ""
    return [f"{many}this looks for the fastest combination that fits, and runs the script with it:", shlex.join(words)]


def advice_title(advice: Advice, run: DryRun) -> str:
    """A change and what it saves, and only as firmly as that is known."""
    capacity = None if run.estimate is None else run.estimate.capacity_bytes
    is_assumed = advice.origin is Origin.ASSUMED
    about, fits, fails = (
        ("about ", "may fit", "probably still too much") if is_assumed else ("", "fits", "still too much")
    )
    enough = "" if capacity is None else f": {fits if advice.peak_bytes <= capacity else fails}"
    saving = f"saves {about}{format_size(advice.saves_bytes)}, leaves {about}{format_size(advice.peak_bytes)}{enough}"
    return f"{printable(advice.title)}: {saving} ({advice.origin.value}; {KEEPS.get(advice.keeps, advice.keeps)})"


def longest(scan: Scan) -> str:
    """The largest batch of a scan in words."""
    if scan.largest_tokens is None:
        return f"the largest batch, {format_size(scan.largest_bytes)} at index {scan.largest_index:,}"
    return f"the longest batch, {scan.largest_tokens:,} tokens at index {scan.largest_index:,}"


def scan_lines(run: DryRun) -> list[str]:
    """How the batches vary and what the largest needs."""
    scan = run.scan
    if scan is None:
        return []
    lines = []
    if scan.num_batches:
        looked = f"{scan.num_batches:,}" if scan.total is None else f"{scan.num_batches:,} of {scan.total:,}"
        sizes = f"all of {format_size(scan.largest_bytes)}"
        if scan.smallest_bytes != scan.largest_bytes:
            sizes = f"{format_size(scan.smallest_bytes)} to {format_size(scan.largest_bytes)}"
            sizes += f", median {format_size(scan.median_bytes)}"
        lines.append(f"{looked} looked at: {sizes}")
        for leaf in scan.leaves:
            shapes = [" x ".join(map(str, sizes)) or "scalar" for sizes in (leaf.smallest_shape, leaf.largest_shape)]
            lines.append(f"{printable(leaf.name)}: {printable(leaf.dtype)}, {' to '.join(dict.fromkeys(shapes))}")
    if scan.fits is not None:
        peak = "" if scan.peak_bytes is None else f": peak {format_size(scan.peak_bytes)} (simulated)"
        lines.append(f"{longest(scan)}{peak}: {figures.answer(scan.fits)}")
    if scan.failure is not None:
        lines += [f"it runs out {place(scan.failure)}", *failure_lines(run, scan.failure)]
    if scan.problem:
        lines.append(f"no step with the largest batch: {printable(scan.problem)}")
    return lines


def notes(run: DryRun) -> list[Note]:
    """The notes that are shown, with one for all values that were read from the device."""
    given = () if run.estimate is None else run.estimate.notes
    return shown_notes(given)


def note_lines(run: DryRun) -> list[str]:
    """Each note in a line."""
    return [note.text if note.code == HARMLESS else note_line(note) for note in notes(run)]


def _progress(run: DryRun) -> str:
    if run.outcome is Outcome.NO_STEP:
        return "ended without an optimizer step"
    counted = f"{run.num_steps} {'step' if run.num_steps == 1 else 'steps'}"
    if run.outcome is Outcome.COMPLETED:
        return f"ran {counted}"
    if run.outcome is Outcome.ENDED:
        return f"ended by itself after {run.num_steps} of {run.steps_wanted} steps"
    until = f"after {counted}" if run.num_steps else "before its first step"
    return f"interrupted {until}" if run.outcome is Outcome.INTERRUPTED else f"{until},"


def _peak(run: DryRun) -> str:
    if run.estimate is None:
        return figures.UNKNOWN
    return f"{figures.needed(run.estimate)} of {format_size(run.estimate.capacity_bytes)}"


def report(run: DryRun) -> Report:
    """A rule, the verdict, where it ran out, what would help, notes."""
    return Report(verdict(run), details(run), parts(run), run.fits, with_rule=True)


def build_run_payload(run: DryRun) -> dict[str, Any]:
    """Everything the page shows, as a plain structure that `json` can write."""
    estimate = run.estimate
    if estimate is None:
        raise BadInput(f"there is nothing to draw: {verdict(run)}.")
    fatal, late = run.fatal, None if run.scan is None else run.scan.failure
    failed = [failure for failure in (fatal, late) if failure is not None]
    # The page has places of its own for these.
    shown = [line for failure in failed for line in failure_lines(run, failure)]
    return {
        **build_payload(estimate),
        "headline": f"memfit dryrun: {command(run)}",
        "demand": verdict(run),
        "answer": answer(run),
        "fits": run.fits,
        "certainty": figures.certainty(estimate) if is_whole(run) else "",
        "ranges": list(figures.ranges(estimate)) if is_whole(run) else [],
        "failure": None if fatal is None else asked(run, fatal),
        "figures": [[f.label, f.value, f.origin] for f in run_figures(run)],
        "seconds": round(run.seconds, 2),
        "notes": [[note.code, note.text, note.source] for note in notes(run)],
        "run": {
            "details": [line for line in (*details(run), *advice_lines(run)) if line not in shown],
            "failure": None if fatal is None else _failure(run, fatal),
            "scan": [line for line in scan_lines(run) if line not in shown],
            "scanFailure": None if late is None else _failure(run, late),
            "advice": [
                [
                    advice.title,
                    format_size(advice.saves_bytes),
                    format_size(advice.peak_bytes),
                    None if estimate.capacity_bytes is None else advice.peak_bytes <= estimate.capacity_bytes,
                    KEEPS.get(advice.keeps, advice.keeps),
                    advice.origin.value,
                    advice.how,
                ]
                for advice in run.advice
            ],
            "redirected": [(given, real or "not kept") for given, real in run.redirected.items()],
        },
    }


def _failure(run: DryRun, failure: Failure) -> dict[str, Any]:
    groups = failure_groups(run, failure)
    rows = figures.rows(groups, sum(groups.values()))
    return {
        "title": f"Held {moment(failure)}",
        "source": failure.source,
        "code": failure.code.strip(),
        "message": failure.message,
        "rows": [[row.name, row.size_bytes, row.share] for row in rows],
    }

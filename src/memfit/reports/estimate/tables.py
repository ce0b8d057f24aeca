"""Tables of several results: estimates, batch sizes or plans by device, and the sizes a search for a batch tried."""

from collections.abc import Sequence

from memfit.core.device import Device
from memfit.core.estimate import Estimate, Note
from memfit.core.plan import Plan, PlanNotFound
from memfit.core.spread import COVERAGE
from memfit.core.units import format_size
from memfit.reports.estimate import figures
from memfit.reports.estimate.figures import UNKNOWN, printable
from memfit.reports.parts import Grid, Line, Part, Report, notes_of
from memfit.reports.plan import figures as plan_figures


def estimates(results: Sequence[Estimate]) -> Report:
    """One job on several devices."""
    cells = [
        (figures.needed(result), *_usable(result), figures.sure_cell(result), figures.step_time(result))
        for result in results
    ]
    devices = [(result.device, result.notes) for result in results]
    titles = (">needed (simulated)", ">usable", ">of usable", ">fits", ">time of a step (simulated)")
    is_good = all(result.fits is not False for result in results)
    return _by_device(figures.headline(results[0]), devices, titles, cells, is_good)


def batches(subject: str, results: Sequence[tuple[int | None, int | None, Estimate]]) -> Report:
    """The largest batch of one job on several devices, each as (with 95%, at best, the estimate at the first)."""
    # Where nothing fits, what is needed is that of the smallest size tried.
    cells = [(str(sure or "none"), str(best or "none"), figures.needed(e), *_usable(e)) for sure, best, e in results]
    devices = [(estimate.device, estimate.notes) for _, _, estimate in results]
    titles = (f">fits with {COVERAGE:.0%}", ">at best", ">needed (simulated)", ">usable", ">of usable")
    is_good = all(best is not None for _, best, _ in results)
    return _by_device(f"{subject}: largest batch size", devices, titles, cells, is_good)


def plans(results: Sequence[tuple[Device, Plan | PlanNotFound]]) -> Report:
    """The plans of one job for several devices, or why there is none."""
    known = [(device, result if isinstance(result, Plan) else result.smallest) for device, result in results]
    subject = next((plan.subject for _, plan in known if plan is not None), "the step")
    devices = [(device, () if plan is None else plan.notes) for device, plan in known]
    titles = (">peak (simulated)", ">budget", ">fits", ">time", ">slowdown", "moves")
    is_good = all(isinstance(result, Plan) for _, result in results)
    return _by_device(f"{subject}: plans", devices, titles, [_plan_cells(result) for _, result in results], is_good)


def _plan_cells(result: Plan | PlanNotFound) -> tuple[str, ...]:
    plan = result if isinstance(result, Plan) else result.smallest
    if plan is None:
        return (UNKNOWN, UNKNOWN, "no", UNKNOWN, UNKNOWN, str(result).splitlines()[0])
    moves = "; ".join(printable(move.title) for move in plan.moves) or "as it is"
    return (
        format_size(plan.after.peak_bytes),
        format_size(plan.budget_bytes),
        figures.yes_or_no(plan.fits),
        plan_figures.with_origin(plan.seconds_after),
        UNKNOWN if plan.slowdown is None else f"{plan.slowdown:.2f}x",
        moves if plan.fits else f"nothing that is allowed fits; the smallest: {moves}",
    )


def _by_device(
    headline: str,
    devices: Sequence[tuple[Device, Sequence[Note]]],
    titles: tuple[str, ...],
    cells: Sequence[tuple[str, ...]],
    is_good: bool,
) -> Report:
    """A line for each device with its cells, and the notes of all."""
    names = [figures.device_title(device) for device, _ in devices]
    lines = tuple(Line((name, *row)) for name, row in zip(names, cells, strict=True))
    notes = notes_of([(name, notes) for name, (_, notes) in zip(names, devices, strict=True)])
    return Report(printable(headline), [], [Part("Devices", grid=Grid(("device", *titles), lines)), *notes], is_good)


def _usable(estimate: Estimate) -> tuple[str, str]:
    """What the device has, and how much of it is needed."""
    usable = figures.with_origin(estimate.capacity_bytes, estimate.device.usable_origin)
    return usable, _share(estimate.peak_bytes, estimate.capacity_bytes)


def _share(peak_bytes: int, usable_bytes: int | None) -> str:
    return f"{peak_bytes / usable_bytes:.0%}" if usable_bytes else UNKNOWN


def largest_batch(sure: int | None, best: int | None) -> str:
    """The answer to a search for the largest batch in a few words.

    Args:
        sure: the largest batch size that fits with a probability of 95%; None when none does.
        best: the largest that fits if all is as estimated; None when none does.
    """
    if best is None:
        return "no batch size fits"
    if sure is None:
        return f"no batch size fits with {COVERAGE:.0%}; {best} at best"
    return f"batch size {sure} fits with {COVERAGE:.0%}{'' if sure == best else f'; {best} at best'}"


def tried_batches(
    tried: Sequence[tuple[int, int, bool | None]],
    sure: int | None,
    best: int | None,
    device: Device,
    shown: Estimate | None = None,
) -> Report:
    """That answer, and the batch sizes that were tried, as (batch size, peak bytes, fits).

    `shown` is the estimate at the sure size, or at the largest at best where none is sure: its time is told.
    """
    lines = []
    for batch_size, peak_bytes, fits in sorted(tried, key=lambda row: row[0]):
        is_at_best = fits and (sure is None or batch_size > sure)
        answer = "at best" if is_at_best else figures.yes_or_no(fits)
        mark, share = ">" if batch_size == sure else "", _share(peak_bytes, device.usable_bytes)
        lines.append(Line((mark, str(batch_size), format_size(peak_bytes), share, answer)))
    grid = Grid(("", ">batch size", ">peak (simulated)", ">of usable", ">fits"), tuple(lines))
    legend = ("at best: fits only if all is as estimated, or because the allocator gives back its cache",)
    answer = largest_batch(sure, best)
    origin = "" if device.usable_bytes is None else f", {device.usable_origin}"
    usable = f"{format_size(device.usable_bytes)} usable on {figures.device_title(device)}{origin}"
    is_good = False if best is None else None if sure is None else True
    return Report(
        f"{answer[0].upper()}{answer[1:]} ({usable})",
        [] if shown is None or shown.time is None else [f"a step of {shown.batch_size}: {figures.step_time(shown)}"],
        [Part("", grid=grid, lines=legend if best != sure else ())],
        is_good,
    )

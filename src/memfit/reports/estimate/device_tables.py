"""Estimates, batch sizes or plans for several devices: a headline and a table with one line per device."""

from collections.abc import Sequence

from memfit.core.device import Device
from memfit.core.estimate import Estimate
from memfit.core.plan import Plan, PlanNotFound
from memfit.core.units import format_size
from memfit.reports.estimate import figures
from memfit.reports.parts import Grid, Line, Part, Report, notes_of
from memfit.reports.plan import figures as plan_figures


def estimates(results: Sequence[Estimate]) -> Report:
    """One job on several devices."""
    lines = [
        Line(
            (
                figures.device_title(result.device),
                figures.needed(result),
                figures.with_origin(result.capacity_bytes, result.device.usable_origin),
                _share(result.peak_bytes, result.capacity_bytes),
                figures.yes_or_no(result.fits),
            )
        )
        for result in results
    ]
    grid = Grid(("device", ">needed (simulated)", ">usable", ">of usable", ">fits"), tuple(lines))
    notes = notes_of([(figures.device_title(result.device), result.notes) for result in results])
    is_good = all(result.fits is not False for result in results)
    return Report(figures.headline(results[0]), [], [Part("Devices", grid=grid), *notes], is_good)


def batches(subject: str, found: Sequence[tuple[int | None, int | None, Estimate]]) -> Report:
    """The largest batch of one job on several devices, each as (safe batch size, limit, the estimate at the first)."""
    lines = [
        Line(
            (
                figures.device_title(estimate.device),
                "none" if safe is None else str(safe),
                "none" if limit is None else str(limit),
                figures.needed(estimate),
                figures.with_origin(estimate.capacity_bytes, estimate.device.usable_origin),
                _share(estimate.peak_bytes, estimate.capacity_bytes),
            )
        )
        for safe, limit, estimate in found
    ]
    # Where nothing fits, what is needed is that of the smallest size tried.
    grid = Grid(("device", ">safe batch size", ">limit", ">needed (simulated)", ">usable", ">of usable"), tuple(lines))
    notes = notes_of([(figures.device_title(estimate.device), estimate.notes) for _, _, estimate in found])
    is_good = all(limit is not None for _, limit, _ in found)
    return Report(
        figures.printable(f"{subject}: largest batch size"), [], [Part("Devices", grid=grid), *notes], is_good
    )


def plans(found: Sequence[tuple[Device, Plan | PlanNotFound]]) -> Report:
    """The plans of one job for several devices, or why there is none."""
    known = [(device, result if isinstance(result, Plan) else result.smallest) for device, result in found]
    subject = next((plan.subject for _, plan in known if plan is not None), "the step")
    lines = [Line((figures.device_title(device), *_plan_cells(result))) for device, result in found]
    grid = Grid(("device", ">peak (simulated)", ">budget", ">fits", ">time", ">slowdown", "moves"), tuple(lines))
    notes = notes_of([(figures.device_title(device), () if plan is None else plan.notes) for device, plan in known])
    is_good = all(isinstance(plan, Plan) for _, plan in found)
    return Report(figures.printable(f"{subject}: plans"), [], [Part("Devices", grid=grid), *notes], is_good)


def _plan_cells(found: Plan | PlanNotFound) -> tuple[str, ...]:
    plan = found if isinstance(found, Plan) else found.smallest
    if plan is None:
        unknown = figures.UNKNOWN
        return (unknown, unknown, "no", unknown, unknown, str(found).splitlines()[0])
    slower = figures.UNKNOWN if plan.slowdown is None else f"{plan.slowdown:.2f}x"
    moves = "; ".join(figures.printable(move.title) for move in plan.moves) or "as it is"
    return (
        format_size(plan.after.peak_bytes),
        format_size(plan.budget_bytes),
        figures.yes_or_no(plan.fits),
        plan_figures.with_origin(plan.seconds_after),
        slower,
        moves if plan.fits else f"nothing that is allowed fits; the smallest: {moves}",
    )


def _share(peak_bytes: int, usable_bytes: int | None) -> str:
    return figures.UNKNOWN if not usable_bytes else f"{peak_bytes / usable_bytes:.0%}"

"""The data behind the page of a plan: moves, front, and what the step holds before and after."""

from typing import Any

from memfit.core.estimate import Estimate
from memfit.core.plan import Plan, PlannedMove
from memfit.core.units import format_size
from memfit.reports.estimate import figures
from memfit.reports.estimate.payload import build_curves
from memfit.reports.parts import KEEPS, shown_notes
from memfit.reports.plan import figures as plan_figures
from memfit.reports.plan.code import format_code

_MAX_SAMPLES = 2000


def build_plan_payload(plan: Plan) -> dict[str, Any]:
    """Everything the page shows, as a plain structure that `json` can write."""
    before, after = plan.estimate_before, plan.estimate_after
    timelines = []
    # A plan that was loaded has no timelines any more.
    if before is not None and after is not None:
        timelines = [_timeline("Before", before), _timeline("After", after)] if plan.moves else [_timeline("", before)]
    return {
        "memfit": figures.package_version(),
        "headline": f"memfit plan: {plan_figures.headline(plan)}",
        "demand": plan_figures.demand(plan),
        "answer": plan_figures.answer(plan),
        "fits": plan.fits,
        "details": plan_figures.details(plan),
        "figures": _figures(plan),
        "moves": list(map(_move, plan.moves)),
        "budget": plan.budget_bytes,
        "front": [
            [
                point.peak_bytes,
                point.seconds,
                plan_figures.format_seconds(point.seconds),
                point.label,
                plan_figures.is_chosen(point, plan),
                plan_figures.point_origin(point),
            ]
            for point in plan.front
        ],
        "timeOrigin": plan.seconds_after.origin.value,
        "byCategory": [list(row) for row in plan_figures.categories(plan)],
        "overheads": list(figures.OVERHEADS),
        "peaks": [plan.before.peak_bytes, plan.after.peak_bytes],
        "timelines": timelines,
        "code": format_code(plan),
        "refused": [[refusal.name, refusal.reason] for refusal in plan.refused],
        "notes": [[note.code, note.text, note.source] for note in shown_notes(plan.notes)],
        "seconds": round(plan.planned_in_seconds, 2),
    }


def _figures(plan: Plan) -> list[list[str]]:
    """(label, value, origin) of each figure at the top of the page."""
    simulated, seconds = "simulated", plan_figures.format_seconds
    before, after = plan.seconds_before, plan.seconds_after
    rows = [
        ["peak as it is", format_size(plan.before.peak_bytes), simulated],
        ["peak as planned", format_size(plan.after.peak_bytes), plan.after.origin.value],
        ["budget", format_size(plan.budget_bytes), ""],
        ["time of a step as it is", seconds(before.seconds), before.origin.value if before.seconds else ""],
        ["time of a step as planned", seconds(after.seconds), after.origin.value if after.seconds else ""],
        ["results", KEEPS[plan.keeps.value], ""],
    ]
    host_bytes = plan.after.host_bytes
    return [*rows, ["further host memory", format_size(host_bytes), simulated]] if host_bytes else rows


def _move(move: PlannedMove) -> list[Any]:
    cost = plan_figures.format_seconds(move.costs_seconds)
    return [
        move.title,
        KEEPS[move.keeps.value],
        format_size(move.saves_bytes),
        move.saves_origin.value,
        f"+{cost}" if move.costs_seconds and move.costs_seconds > 0 else cost,
        "" if move.costs_seconds is None else move.costs_origin.value,
        move.caveat,
    ]


def _timeline(title: str, estimate: Estimate) -> dict[str, Any]:
    text = f"peak {figures.needed(estimate)} {estimate.moment}"
    return {
        "title": f"{title}: {text}" if title else text[:1].upper() + text[1:],
        "peak": estimate.peak_bytes,
        **build_curves(estimate, _MAX_SAMPLES),
    }

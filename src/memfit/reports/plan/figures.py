"""What every report says about a plan, before any of them decides how it looks.

As for a dry run: a verdict, a few lines below it, and parts. Text, terminal and page show the same ones.
"""

from memfit.core.device import Origin
from memfit.core.plan import Plan, PlannedMove, Point, Seconds
from memfit.core.settings import Keeps
from memfit.core.units import format_seconds as format_seconds
from memfit.core.units import format_size
from memfit.planner.moves import DROPOUT
from memfit.reports.estimate import figures
from memfit.reports.estimate.figures import UNKNOWN, printable
from memfit.reports.parts import KEEPS, Grid, Line, Part, Report, note_line, shown_notes

NUM_POINTS = 6
_NUM_REFUSED = 8


def headline(plan: Plan) -> str:
    """The first line: job, device, memory before and after."""
    batch = UNKNOWN if plan.batch_size is None else str(plan.batch_size)
    several = f"{plan.settings.num_devices} x " if plan.settings.num_devices > 1 else ""
    target = several + figures.device_title(plan.device)
    return printable(f"{plan.subject}: batch size {batch} on {target}, {format_size(plan.budget_bytes)} to use")


def demand(plan: Plan) -> str:
    """Peak before and after, beside the budget."""
    before, after = format_size(plan.before.peak_bytes), format_size(plan.after.peak_bytes)
    change = f"{after} as it is" if not plan.moves else f"{before} -> {after} ({plan.after.origin.value})"
    return f"{change}, budget {format_size(plan.budget_bytes)}"


def verdict(plan: Plan) -> str:
    """The one line that answers the question."""
    several = f"{plan.settings.num_devices} x " if plan.settings.num_devices > 1 else ""
    where = f"{printable(plan.subject)} on {several}{figures.device_title(plan.device)}"
    return f"{where}: {demand(plan)}: {answer(plan)}"


def answer(plan: Plan) -> str:
    """Whether the planned step fits, and how sure that is."""
    sure = figures.in_percent(plan.fit_probability, plan.fits) if plan.fits else ""
    return figures.answer(plan.fits) + (f" ({sure})" if sure else "")


def details(plan: Plan) -> list[str]:
    """Lines below the verdict."""
    lines = []
    over = plan.after.peak_bytes - plan.budget_bytes
    if over > 0:
        lines.append(f"{format_size(over)} more than the budget, with every move that was allowed and helps")
    lines.append(pace(plan))
    if plan.settings.num_devices > 1:
        lines.append("memory is that of one device")
    if plan.after.host_bytes:
        lines.append(f"{format_size(plan.after.host_bytes)} of host memory for what is offloaded (simulated)")
    lines.append(numbers(plan))
    if plan.device.stack is not None:
        lines.append("software: {} ({})".format(*figures.software(plan.device)))
    return lines


def pace(plan: Plan) -> str:
    """Time of a step before and after, each with its origin."""
    if plan.seconds_after.seconds is None:
        return "time of a step: unknown, because the speed of the device is unknown"
    if not plan.moves:
        return f"time of a step: {with_origin(plan.seconds_after)}"
    change = f"time of a step: {with_origin(plan.seconds_before)} -> {with_origin(plan.seconds_after)}"
    return change if plan.slowdown is None else f"{change}, {slowdown(plan)}"


def slowdown(plan: Plan) -> str:
    """How much longer a step takes in words; "unknown" where a time is."""
    factor = plan.slowdown
    if factor is None:
        return UNKNOWN
    if abs(factor - 1) < 0.005:
        return "as long as before"
    return f"{factor:.2f} times as long"


def with_origin(time: Seconds) -> str:
    """A time and how it is known."""
    return UNKNOWN if time.seconds is None else f"{format_seconds(time.seconds)} ({time.origin.value})"


def numbers(plan: Plan) -> str:
    """What the plan does to the results of training, in one sentence."""
    named = {keeps: [printable(move.title) for move in plan.moves if move.keeps is keeps] for keeps in Keeps}
    if not plan.moves:
        return "results: unchanged, the step runs as it is"
    if plan.keeps is Keeps.EXACT:
        return "results: gradients and updates are identical to those of the step as it is"
    exact = f". Identical: {'; '.join(named[Keeps.EXACT])}" if named[Keeps.EXACT] else ""
    rounding = "; ".join(named[Keeps.ROUNDING])
    if plan.keeps is Keeps.ROUNDING:
        masks = " except for dropout masks" if any(move.caveat == DROPOUT for move in plan.moves) else ""
        return f"results: the same up to floating-point rounding{masks}, because of: {rounding}{exact}"
    rounded = f". The same up to rounding: {rounding}" if rounding else ""
    return f"results: training changes, because of: {'; '.join(named[Keeps.CHANGES])}{rounded}{exact}"


def parts(plan: Plan) -> list[Part]:
    """Everything below the verdict and its lines."""
    moves = [
        Line(
            (printable(move.title), KEEPS[move.keeps.value], saving(move), cost(move)),
            (printable(move.caveat),) if move.caveat else (),
        )
        for move in plan.moves
    ]
    at_peak = [(printable(name), before, after) for name, before, after in categories(plan)]
    at_peak.append(("in all", plan.before.peak_bytes, plan.after.peak_bytes))
    sizes = [Line((name, format_size(before), format_size(after))) for name, before, after in at_peak]
    front = [
        Line(
            (
                ">" if is_chosen(point, plan) else "",
                f"{format_size(point.peak_bytes)} ({point_origin(point)})",
                format_seconds(point.seconds),
                printable(point.label),
            )
        )
        for point in few_points(plan)
    ]
    # A front of one point says nothing that the verdict doesn't.
    front = front if len(front) > 1 else []
    shown = [
        Part("Moves", grid=Grid(("move", "results", ">saves", ">costs"), tuple(moves))),
        Part(
            "At the peak, before and after",
            grid=Grid(("category", ">before", ">after"), tuple(sizes) if plan.moves else ()),
        ),
        Part("Memory against time: the best plans known", grid=Grid(("", ">peak", ">time", "moves"), tuple(front))),
        Part("Not considered", lines=tuple(refusal_lines(plan, _NUM_REFUSED))),
        Part("Notes", lines=tuple(map(note_line, shown_notes(plan.notes)))),
    ]
    return [part for part in shown if part.holds_something]


def saving(move: PlannedMove) -> str:
    """What a move saves, and how that is known."""
    return f"{format_size(move.saves_bytes)} ({move.saves_origin.value})"


def cost(move: PlannedMove) -> str:
    """What a move costs a step in time, and how that is known."""
    if move.costs_seconds is None:
        return UNKNOWN
    sign = "+" if move.costs_seconds > 0 else ""
    return f"{sign}{format_seconds(move.costs_seconds)} ({move.costs_origin.value})"


def categories(plan: Plan) -> list[tuple[str, int, int]]:
    """(category, bytes before, bytes after) at each one's peak, largest first."""
    before, after = plan.before.by_category, plan.after.by_category
    names = sorted({*before, *after}, key=lambda name: (-max(before.get(name, 0), after.get(name, 0)), name))
    return [(name, before.get(name, 0), after.get(name, 0)) for name in names]


def is_chosen(point: Point, plan: Plan) -> bool:
    """Whether a point of the front is the plan itself, which one is at most."""
    same = (one for one in plan.front if one.settings == plan.settings and one.peak_bytes == plan.after.peak_bytes)
    return point is next(same, None)


def point_origin(point: Point) -> str:
    """How the peak of a point is known."""
    return (Origin.SIMULATED if point.verified else Origin.ASSUMED).value


def few_points(plan: Plan) -> list[Point]:
    """Points of the front that show its shape: the ends, the plan itself, and some between."""
    front = list(plan.front)
    if len(front) <= NUM_POINTS:
        return front
    wanted = {round(index * (len(front) - 1) / (NUM_POINTS - 2)) for index in range(NUM_POINTS - 1)}
    return [point for index, point in enumerate(front) if index in wanted or is_chosen(point, plan)]


def refusal_lines(plan: Plan, most: int) -> list[str]:
    """Each move that was not considered, in a line."""
    lines = [f"{printable(refusal.name)}: {printable(refusal.reason)}" for refusal in plan.refused]
    more = len(lines) - most
    return lines if more <= 0 else [*lines[:most], f"and {more} more"]


def report(plan: Plan) -> Report:
    """Verdict, moves, before and after, front, refusals, notes."""
    return Report(verdict(plan), details(plan), parts(plan), plan.fits)

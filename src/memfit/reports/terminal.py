"""Reports for a terminal, in colour where the terminal has colour.

rich is imported inside the functions that draw with it, so that importing this is light. Names reach rich as `Text`,
never as markup, so a module called "[red]" stays a name.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memfit.core.device import Device, Origin
from memfit.core.errors import BadInput
from memfit.core.estimate import Estimate
from memfit.core.timeline import Category
from memfit.core.units import format_size
from memfit.reports.estimate import batches, figures
from memfit.reports.estimate.figures import UNKNOWN
from memfit.reports.estimate.text import report
from memfit.reports.parts import Grid, Part, Report, notes_of
from memfit.reports.table import FittingTable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

# Wide enough for the longest name of a category, so that the numbers of all lists stand under each other.
_NAME_WIDTH = 43
_STYLES = {
    Category.PARAMETER.value: "blue",
    Category.BUFFER.value: "bright_black",
    Category.GRADIENT.value: "red",
    Category.OPTIMIZER_STATE.value: "magenta",
    Category.ACTIVATION.value: "yellow",
    Category.TEMPORARY.value: "bright_yellow",
    Category.BATCH.value: "green",
    Category.WORKSPACE.value: "cyan",
}


def render_estimate(estimate: Estimate) -> "RenderableType":
    """The estimate as something rich can print."""
    from rich.console import Group
    from rich.text import Text

    said = report(estimate)
    bounds, *lost = said.details
    return Group(
        Text(figures.headline(estimate), style="bold"),
        Text(said.verdict, style=f"bold {verdict_style(said.is_good)}"),
        Text(bounds, style="dim"),
        *(Text(line, style="red") for line in lost),
        *_rendered(said.parts),
    )


def render_report(said: Report) -> "RenderableType":
    """The report as something rich can print: a verdict in its colour, the lines below it, and titled parts."""
    from rich.console import Group
    from rich.rule import Rule
    from rich.text import Text

    rule = [Rule(style="dim")] if said.with_rule else []
    verdict = Text(said.verdict, style=f"bold {verdict_style(said.is_good)}")
    return Group(*rule, verdict, *map(_line, said.details), *_rendered(said.parts))


def _rendered(parts: Sequence[Part]) -> "Iterator[RenderableType]":
    from rich.text import Text

    for part in parts:
        yield Text(f"\n{part.title}", style="bold")
        if part.rows:
            shares = [(figures.format_share(row.share),) if part.with_share else () for row in part.rows]
            cells = [
                (row.name, format_size(row.size_bytes), *share) for row, share in zip(part.rows, shares, strict=True)
            ]
            bars = [(row.share, _STYLES.get(row.name, "bright_black")) for row in part.rows if part.with_bar]
            yield _indented(FittingTable(("", ">", ">")[: len(cells[0])], cells, bars=bars, least_width=_NAME_WIDTH))
        if part.figures:
            # Origins are words that must not be folded, like figures.
            origins = [(f.label, f.value, Text(f.origin, style="dim")) for f in part.figures]
            yield _indented(FittingTable(("", ">", ""), origins, least_width=_NAME_WIDTH))
        if part.grid is not None:
            yield _indented(_grid(part.grid))
        yield from (_line(line, labelled=part.labelled) for line in part.lines)


def _line(text: str, *, labelled: bool = False) -> "RenderableType":
    from rich.text import Text

    line = Text(text.lstrip())
    if labelled:
        line.stylize("cyan", 0, line.plain.index(": ") + 2)
    return _indented(line, 2 + len(text) - len(text.lstrip()))


def render_comparison(estimates: Sequence[Estimate]) -> "RenderableType":
    """The estimates side by side, a column each; the last row is the saving of the peak against the first."""
    if not estimates:
        raise BadInput("nothing to compare: expected at least one estimate, got none.")
    from rich.console import Group
    from rich.text import Text

    columns = [_comparison_column(estimate) for estimate in estimates]
    rows: list[list[str | Text]] = [
        [Text(label, style="bold" if label in ("peak", "fits") else ""), *(column[label] for column in columns)]
        for label in columns[0]
    ]
    first, *others = estimates
    if others:
        rows.append([Text("peak against the first"), "-", *(_saving(first, other) for other in others)])
    titles = [figures.printable(estimate.subject) for estimate in estimates]
    devices = [figures.device_title(estimate.device) for estimate in estimates]
    if len(set(titles)) < len(titles):
        # A model on several devices: where rows become lines of their own, the title alone tells them apart.
        titles = [f"{title}, {device}" for title, device in zip(titles, devices, strict=True)]
    names = devices if len(set(devices)) == len(devices) else titles
    parts: list[RenderableType] = [Text("Comparison", style="bold"), FittingTable(("", *titles), rows)]
    for part in notes_of([(name, estimate.notes) for name, estimate in zip(names, estimates, strict=True)]):
        parts.append(Text(f"\n{part.title}", style="bold"))
        parts += [_indented(Text(line)) for line in part.lines]
    return Group(*parts)


def render_devices(devices: Sequence[Device]) -> "RenderableType":
    """The devices as a table: memory, capability, bandwidth; for a single device also where its figures come from."""
    from rich.console import Group
    from rich.text import Text

    # A column of words would take the room that a list needs for its figures.
    origin = figures.with_origin if len(devices) == 1 else _marked
    titles = ("name", "device", ">nominal", ">usable", ">context", ">capability", ">bandwidth")
    rows = [
        (
            Text(figures.printable(device.name), style="bold"),
            figures.device_title(device),
            format_size(device.nominal_bytes),
            origin(device.usable_bytes, device.usable_origin),
            origin(device.context_bytes, device.context_origin),
            figures.capability(device),
            figures.bandwidth(device),
        )
        for device in devices
    ]
    table = FittingTable(titles, rows)
    if len(devices) != 1:
        return Group(table, Text("~ assumed; other usable and context sizes were measured", style="dim"))
    source = ", ".join(part for part in (devices[0].source, devices[0].date) if part) or UNKNOWN
    return Group(table, Text(figures.printable(f"source: {source}")))


def render_max_batch(
    rows: Sequence[tuple[int, int, bool | None]], safe: int | None, limit: int | None, device: Device
) -> "RenderableType":
    """The batch sizes that were tried, as (batch size, peak bytes, fits), and which of them to use.

    Args:
        rows: what was tried, in any order.
        safe: the batch size to use; None when none is safe.
        limit: the largest that fits; None when none does.
        device: the target.
    """
    from rich.console import Group
    from rich.text import Text

    style = verdict_style(False if limit is None else None if safe is None else True)
    title = Text(batches.title(safe, limit, device), style=f"bold {style}")
    return Group(title, _grid(batches.grid(rows, safe, device)))


def _indented(part: "RenderableType", indent: int = 2) -> "RenderableType":
    """A part whose lines, those that wrap included, stand below each other."""
    from rich.padding import Padding

    return Padding(part, (0, 0, 0, indent), expand=False)


def _grid(grid: Grid) -> FittingTable:
    return FittingTable(
        grid.columns, [line.cells for line in grid.lines], remarks=[line.remarks for line in grid.lines]
    )


def _marked(size_bytes: int | None, origin: Origin) -> str:
    return f"{'~' if size_bytes is not None and origin is not Origin.MEASURED else ''}{format_size(size_bytes)}"


def verdict_style(fits: bool | None) -> str:
    """The colour of an answer."""
    return {True: "green", False: "red", None: "yellow"}[fits]


def _comparison_column(estimate: Estimate) -> dict[str, str]:
    category = estimate.breakdown.by_category
    return {
        "device": figures.device_title(estimate.device),
        "mode": estimate.mode,
        "precision": figures.printable(estimate.precision),
        "batch size": UNKNOWN if estimate.batch_size is None else str(estimate.batch_size),
        "parameters": figures.parameters(estimate),
        "peak": figures.needed(estimate),
        "allocated": format_size(estimate.allocated_peak_bytes),
        "CUDA context": figures.context(estimate),
        "activations": format_size(category.get(Category.ACTIVATION.value, 0)),
        "gradients": format_size(category.get(Category.GRADIENT.value, 0)),
        "optimizer state": format_size(category.get(Category.OPTIMIZER_STATE.value, 0)),
        "usable": format_size(estimate.capacity_bytes),
        "fits": figures.yes_or_no(estimate.fits),
        "host memory": figures.host_total(estimate),
    }


def _saving(first: Estimate, other: Estimate) -> "Text":
    from rich.text import Text

    before, after = first.peak_bytes, other.peak_bytes
    if after == before:
        return Text("no change")
    share = f" ({(after - before) / before:+.1%})" if before else ""
    sign, style = ("-", "green") if after < before else ("+", "red")
    return Text(f"{sign}{format_size(abs(after - before))}{share}", style=style)

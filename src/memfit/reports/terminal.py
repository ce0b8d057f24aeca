"""Reports for a terminal, in colour where the terminal has colour.

rich is imported inside the functions that draw with it: `format_estimate`, which `print(estimate)` needs, must work
in an install without it. Names reach rich as `Text`, never as markup, so a module called "[red]" stays a name.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memfit.core.device import Device, Origin
from memfit.core.errors import BadInput, MissingDependency
from memfit.core.estimate import Estimate
from memfit.core.timeline import Category
from memfit.core.units import format_size
from memfit.reports import batches, figures
from memfit.reports.figures import UNKNOWN, Row
from memfit.reports.fitting_table import FittingTable
from memfit.reports.parts import Grid, Part, notes_of
from memfit.reports.text import NUM_TOP, format_estimate

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

__all__ = [
    "breakdown_table",
    "format_estimate",
    "print_estimate",
    "render_comparison",
    "render_devices",
    "render_estimate",
    "render_max_batch",
    "render_parts",
    "require_rich",
    "verdict_style",
]

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


def print_estimate(estimate: Estimate, console: "Console | None" = None) -> None:
    """Print the estimate to `console`, by default standard output."""
    require_rich()
    from rich.console import Console

    (Console() if console is None else console).print(render_estimate(estimate))


def render_estimate(estimate: Estimate) -> "RenderableType":
    """The estimate as something rich can print: verdict, breakdown, top modules and lines, host, figures, notes."""
    require_rich()
    from rich.console import Group
    from rich.text import Text

    peak_bytes, breakdown = estimate.peak_bytes, estimate.breakdown
    head = [
        Text(figures.headline(estimate), style="bold"),
        Text(figures.verdict(estimate), style=f"bold {verdict_style(estimate.fits)}"),
        Text(figures.bounds(estimate), style="dim"),
    ]
    lost = figures.failure(estimate)
    if lost is not None:
        head.append(Text(lost, style="red"))
    modules = figures.top_rows(breakdown.by_module, peak_bytes, NUM_TOP)
    sources = figures.top_rows(breakdown.by_source, peak_bytes, NUM_TOP)
    sections = {
        f"Peak {figures.printable(estimate.moment)}": breakdown_table(
            figures.rows(breakdown.by_category, peak_bytes), with_bar=True
        ),
        f"Largest modules at the peak (top {NUM_TOP})": breakdown_table(modules),
        f"Largest source lines at the peak (top {NUM_TOP})": breakdown_table(sources),
        f"Host memory: {figures.host_total(estimate)}": _host_table(estimate),
        f"Figures and their origin ({figures.parameters(estimate)} parameters)": _figures_table(estimate),
    }
    parts: list[RenderableType] = [*head]
    for title, table in sections.items():
        parts += [Text(f"\n{title}", style="bold"), table]
    if estimate.notes:
        parts.append(Text("\nNotes", style="bold"))
    for note in estimate.notes:
        where = f" ({figures.printable(note.source)})" if note.source else ""
        code = f"{figures.printable(note.code)}: "
        parts.append(_indented(Text.assemble((code, "cyan"), figures.printable(note.text) + where)))
    return Group(*parts)


def render_comparison(estimates: Sequence[Estimate]) -> "RenderableType":
    """The estimates side by side, a column each; the last row is the saving of the peak against the first."""
    if not estimates:
        raise BadInput("nothing to compare: expected at least one estimate, got none.")
    require_rich()
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
    titles = ("", *(figures.printable(estimate.subject) for estimate in estimates))
    devices = [figures.device_title(estimate.device) for estimate in estimates]
    names = devices if len(set(devices)) == len(devices) else titles[1:]
    parts: list[RenderableType] = [Text("Comparison", style="bold"), FittingTable(titles, rows)]
    for part in notes_of([(name, estimate.notes) for name, estimate in zip(names, estimates, strict=True)]):
        parts.append(Text(f"\n{part.title}", style="bold"))
        parts += [_indented(Text(line)) for line in part.lines]
    return Group(*parts)


def render_devices(devices: Sequence[Device]) -> "RenderableType":
    """The devices as a table: memory, capability, bandwidth; for a single device also where its figures come from."""
    require_rich()
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
        return Group(table, Text("~ assumed; what is usable and the context of others was measured", style="dim"))
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
    require_rich()
    from rich.console import Group
    from rich.text import Text

    style = verdict_style(False if limit is None else None if safe is None else True)
    title = Text(batches.title(safe, limit, device), style=f"bold {style}")
    return Group(title, _grid(batches.grid(rows, safe, device)))


def render_parts(verdict: str, details: list[str], parts: list[Part], *, style: str) -> "RenderableType":
    """A verdict in the colour of its answer, the lines below it, and titled parts."""
    from rich.console import Group
    from rich.text import Text

    def line(text: str) -> "RenderableType":
        return _indented(Text(text.lstrip()), 2 + len(text) - len(text.lstrip()))

    found: list[RenderableType] = [Text(verdict, style=f"bold {style}"), *map(line, details)]
    for part in parts:
        found.append(Text(f"\n{part.title}", style="bold"))
        if part.rows:
            found.append(breakdown_table(list(part.rows), with_bar=part.with_bar))
        if part.grid is not None:
            found.append(_indented(_grid(part.grid)))
        found += map(line, part.lines)
    return Group(*found)


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


def require_rich() -> None:
    """Says what to install where rich is missing."""
    try:
        import rich  # noqa: F401 (only whether it can be imported matters)
    except ImportError:
        raise MissingDependency("coloured reports need rich, which isn't installed. Run `pip install rich`.") from None


def verdict_style(fits: bool | None) -> str:
    """The colour of an answer."""
    return {True: "green", False: "red", None: "yellow"}[fits]


def breakdown_table(rows: list[Row], with_bar: bool = False) -> "RenderableType":
    """The lines of a breakdown, with bars of their shares where that is wanted."""
    cells = [(row.name, format_size(row.size_bytes), figures.format_share(row.share)) for row in rows]
    bars = [(row.share, _STYLES.get(row.name, "bright_black")) for row in rows] if with_bar else ()
    return _indented(FittingTable(("", ">", ">"), cells, bars=bars, least_width=_NAME_WIDTH))


def _host_table(estimate: Estimate) -> "RenderableType":
    rows = figures.rows(estimate.host.parts, estimate.host.total_bytes)
    cells = [(row.name, format_size(row.size_bytes)) for row in rows]
    return _indented(FittingTable(("", ">"), cells, least_width=_NAME_WIDTH))


def _figures_table(estimate: Estimate) -> "RenderableType":
    from rich.text import Text

    # Origins are words that must not be folded, like figures.
    cells = [(f.label, f.value, Text(f.origin, style="dim")) for f in figures.figures(estimate)]
    return _indented(FittingTable(("", ">", ""), cells, least_width=_NAME_WIDTH))


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

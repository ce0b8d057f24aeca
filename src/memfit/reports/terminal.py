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
from memfit.reports import figures
from memfit.reports.figures import UNKNOWN, Row
from memfit.reports.parts import Grid, Part
from memfit.reports.text import NUM_TOP, format_estimate

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table
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

_BAR_WIDTH = 20
# Wide enough for the longest name of a category, so that the numbers of all lists stand under each other.
_NAME_WIDTH = 45
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


class _Bar:
    """A bar of a given share, in ASCII where the console has nothing better."""

    def __init__(self, share: float, style: str) -> None:
        self.share, self.style = share, style

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        sign = "#" if options.ascii_only else "\u2588"
        yield Text(sign * round(self.share * _BAR_WIDTH), style=self.style)


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
        code = f"  {figures.printable(note.code)}: "
        parts.append(Text.assemble((code, "cyan"), figures.printable(note.text) + where))
    return Group(*parts)


def render_comparison(estimates: Sequence[Estimate]) -> "RenderableType":
    """The estimates side by side, a column each; the last row is the saving of the peak against the first."""
    if not estimates:
        raise BadInput("nothing to compare: expected at least one estimate, got none.")
    require_rich()
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Comparison", title_justify="left", title_style="bold")
    table.add_column("")
    for estimate in estimates:
        table.add_column(Text(figures.printable(estimate.subject)), justify="right")
    columns = [_comparison_column(estimate) for estimate in estimates]
    for label in columns[0]:
        style = "bold" if label in ("peak", "fits") else ""
        table.add_row(label, *(Text(column[label]) for column in columns), style=style)
    table.add_section()
    first, *others = estimates
    table.add_row("peak against the first", "-", *(_saving(first, other) for other in others))
    return table


def render_devices(devices: Sequence[Device]) -> "RenderableType":
    """The devices as a table: memory, capability, bandwidth; for a single device also where its figures come from."""
    require_rich()
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table()
    table.add_column("name", no_wrap=True)
    table.add_column("device", overflow="fold")
    for label in ("nominal", "usable", "context", "capability", "bandwidth"):
        table.add_column(label, justify="right")
    for device in devices:
        bandwidth = device.bandwidth_bytes_per_second
        table.add_row(
            Text(figures.printable(device.name), style="bold"),
            Text(figures.device_title(device)),
            format_size(device.nominal_bytes),
            _with_origin(device.usable_bytes, device.usable_origin),
            _with_origin(device.context_bytes, device.context_origin),
            UNKNOWN if device.capability is None else f"{device.capability[0]}.{device.capability[1]}",
            UNKNOWN if bandwidth is None else f"{format_size(round(bandwidth))}/s",
        )
    if len(devices) != 1:
        return table
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
    from rich.table import Table
    from rich.text import Text

    table = Table()
    table.add_column("")
    for label in ("batch size", "peak", "of the usable"):
        table.add_column(label, justify="right")
    table.add_column("fits")
    for batch_size, peak_bytes, fits in sorted(rows, key=lambda row: row[0]):
        share = UNKNOWN if not device.usable_bytes else f"{peak_bytes / device.usable_bytes:.0%}"
        answer = figures.batch_answer(batch_size, fits, safe)
        table.add_row(
            ">" if batch_size == safe else "",
            str(batch_size),
            format_size(peak_bytes),
            share,
            Text(answer, style=verdict_style(fits if answer != "at the limit" else None)),
            style="bold" if batch_size == safe else "",
        )
    style = verdict_style(False if limit is None else None if safe is None else True)
    return Group(Text(figures.batch_sizes(safe, limit, device), style=f"bold {style}"), table)


def render_parts(verdict: str, details: list[str], parts: list[Part], *, style: str) -> "RenderableType":
    """A verdict in the colour of its answer, the lines below it, and titled parts."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    def line(text: str) -> "RenderableType":
        # What wraps stays below its beginning.
        indent = 2 + len(text) - len(text.lstrip())
        return Padding(Text(text.lstrip()), (0, 0, 0, indent), expand=False)

    found: list[RenderableType] = [Text(verdict, style=f"bold {style}"), *map(line, details)]
    for part in parts:
        found.append(Text(f"\n{part.title}", style="bold"))
        if part.rows:
            found.append(breakdown_table(list(part.rows), with_bar=part.with_bar))
        if part.grid is not None:
            found.append(Padding(_grid(part.grid), (0, 0, 0, 2), expand=False))
        found += map(line, part.lines)
    return Group(*found)


def _grid(grid: Grid) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for title in grid.columns:
        right = title.startswith(">")
        table.add_column(title.removeprefix(">"), justify="right" if right else "left", no_wrap=right, overflow="fold")
    for line in grid.lines:
        first, *rest = (Text(cell) for cell in line.cells)
        for remark in line.remarks:
            first.append(f"\n  {remark}", style="dim")
        table.add_row(first, *rest)
    return table


def _with_origin(size_bytes: int | None, origin: Origin) -> str:
    return UNKNOWN if size_bytes is None else f"{format_size(size_bytes)} ({origin.value})"


def require_rich() -> None:
    """Says what to install where rich is missing."""
    try:
        import rich  # noqa: F401 (only whether it can be imported matters)
    except ImportError:
        raise MissingDependency("coloured reports need rich, which isn't installed. Run `pip install rich`.") from None


def verdict_style(fits: bool | None) -> str:
    """The colour of an answer."""
    return {True: "green", False: "red", None: "yellow"}[fits]


def _fits_word(fits: bool | None) -> str:
    return {True: "yes", False: "no", None: UNKNOWN}[fits]


def _listing() -> "Table":
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=_NAME_WIDTH, overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    return table


def breakdown_table(rows: list[Row], with_bar: bool = False) -> "Table":
    """The lines of a breakdown, with bars of their shares where that is wanted."""
    from rich.text import Text

    table = _listing()
    table.add_column(justify="right", no_wrap=True)
    if with_bar:
        table.add_column(width=_BAR_WIDTH)
    for row in rows:
        bar = [_Bar(row.share, _STYLES.get(row.name, "bright_black"))] if with_bar else []
        table.add_row(Text("  " + row.name), format_size(row.size_bytes), figures.format_share(row.share), *bar)
    return table


def _host_table(estimate: Estimate) -> "Table":
    from rich.text import Text

    table = _listing()
    for row in figures.rows(estimate.host.parts, estimate.host.total_bytes):
        table.add_row(Text("  " + row.name), format_size(row.size_bytes))
    return table


def _figures_table(estimate: Estimate) -> "Table":
    from rich.text import Text

    table = _listing()
    for figure in figures.figures(estimate):
        table.add_row(Text("  " + figure.label), figure.value, Text(figure.origin, style="dim"))
    return table


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
        "fits": _fits_word(estimate.fits),
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

"""Reports for a terminal, in colour where the terminal has colour.

Commands import this only where they draw, because rich takes time to load. Names reach rich as `Text`, never as
markup, so a module called "[red]" stays a name.
"""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.segment import Segment
from rich.text import Text

from memfit.core.device import Device, Origin
from memfit.core.estimate import Estimate
from memfit.core.timeline import Category
from memfit.core.units import format_size
from memfit.reports.estimate import figures
from memfit.reports.estimate.figures import UNKNOWN
from memfit.reports.parts import Part, Report, format_share, notes_of
from memfit.reports.table import FittingTable

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
_VERDICTS = {True: "bold green", False: "bold red", None: "bold yellow"}


class SafeConsole(Console):
    """A console that no text can steer, and whose reader may go away."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of text; reports escape what they show, and what they forget is escaped here."""
        for segment in super().render(renderable, options):
            is_safe = segment.control is not None or segment.text.rstrip("\n").isprintable()
            yield segment if is_safe else segment._replace(text=figures.printable(segment.text, keep="\n"))

    def on_broken_pipe(self) -> None:
        """Leaves it to `main`; rich would end the program with exit code 1."""
        raise BrokenPipeError


def render_estimate(estimate: Estimate) -> RenderableType:
    """The estimate as something rich can print."""
    report = figures.report(estimate)
    certainty, *failure = report.details
    return Group(
        Text(figures.headline(estimate), style="bold"),
        Text(report.verdict, style=_VERDICTS[report.is_good]),
        Text(certainty, style="dim"),
        *(Text(line, style="red") for line in failure),
        *_rendered(report.parts),
    )


def render_report(report: Report) -> RenderableType:
    """The report as something rich can print: a verdict in its colour, the lines below it, and titled parts."""
    rule = [Rule(style="dim")] if report.with_rule else []
    verdict = Text(report.verdict, style=_VERDICTS[report.is_good])
    return Group(*rule, verdict, *map(_line, report.details), *_rendered(report.parts))


def _rendered(parts: Sequence[Part]) -> Iterator[RenderableType]:

    for part in parts:
        if part.title:
            yield Text(f"\n{part.title}", style="bold")
        if part.rows:
            num_columns = 3 if part.with_share else 2
            cells = [
                (row.name, format_size(row.size_bytes), format_share(row.share))[:num_columns] for row in part.rows
            ]
            bars = [(row.share, _STYLES.get(row.name, "bright_black")) for row in part.rows if part.with_bar]
            yield _indented(FittingTable(("", ">", ">")[:num_columns], cells, bars=bars, least_width=_NAME_WIDTH))
        if part.figures:
            # Origins are words that must not be folded, like figures.
            origins = [(f.label, f.value, Text(f.origin, style="dim")) for f in part.figures]
            yield _indented(FittingTable(("", ">", ""), origins, least_width=_NAME_WIDTH))
        if part.grid is not None:
            lines = part.grid.lines
            remarks = [line.remarks for line in lines]
            yield _indented(FittingTable(part.grid.columns, [line.cells for line in lines], remarks=remarks))
        yield from (_line(line, labelled=part.labelled) for line in part.lines)


def _line(text: str, *, labelled: bool = False) -> RenderableType:

    line = Text(text.lstrip())
    if labelled:
        line.stylize("cyan", 0, line.plain.index(": ") + 2)
    return _indented(line, 2 + len(text) - len(text.lstrip()))


PEAK = "peak (simulated)"


def render_comparison(estimates: Sequence[Estimate]) -> RenderableType:
    """The estimates side by side, a column each; the last row is the saving of the peak against the first."""
    columns = [_comparison_column(estimate) for estimate in estimates]
    rows: list[list[str | Text]] = [
        [Text(label, style="bold" if label in (PEAK, "fits") else ""), *(column[label] for column in columns)]
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
    notes = notes_of([(name, estimate.notes) for name, estimate in zip(names, estimates, strict=True)])
    return Group(Text("Comparison", style="bold"), FittingTable(("", *titles), rows), *_rendered(notes))


def render_devices(devices: Sequence[Device]) -> RenderableType:
    """The devices as a table: memory, capability, bandwidth; for a single device also where its figures come from."""

    def marked(size_bytes: int | None, origin: Origin) -> str:
        return f"{'~' if size_bytes is not None and origin is not Origin.MEASURED else ''}{format_size(size_bytes)}"

    def bandwidth(device: Device) -> str:
        rate = device.bandwidth_bytes_per_second
        return UNKNOWN if rate is None else f"{format_size(round(rate))}/s"

    # A column of words would take the room that a list needs for its figures.
    sized = figures.with_origin if len(devices) == 1 else marked
    titles = ("name", "device", ">nominal", ">usable", ">context", ">capability", ">bandwidth")
    rows = [
        (
            Text(figures.printable(device.name), style="bold"),
            figures.device_title(device),
            format_size(device.nominal_bytes),
            sized(device.usable_bytes, device.usable_origin),
            sized(device.context_bytes, device.context_origin),
            UNKNOWN if device.capability is None else "{}.{}".format(*device.capability),
            bandwidth(device),
        )
        for device in devices
    ]
    table = FittingTable(titles, rows)
    if len(devices) != 1:
        return Group(table, Text("~ assumed; other usable and context sizes were measured", style="dim"))
    source = ", ".join(part for part in (devices[0].source, devices[0].date) if part) or UNKNOWN
    stack = "" if devices[0].stack is None else "\nsoftware: {} ({})".format(*figures.software(devices[0]))
    return Group(table, Text(figures.printable(f"source: {source}") + stack))


def _indented(part: RenderableType, indent: int = 2) -> RenderableType:
    """A part whose lines, those that wrap included, stand below each other."""
    return Padding(part, (0, 0, 0, indent), expand=False)


def _comparison_column(estimate: Estimate) -> dict[str, str]:
    category = estimate.breakdown.by_category
    return {
        "device": figures.device_title(estimate.device),
        figures.SOFTWARE: ", ".join(filter(None, figures.software(estimate.device))),
        "mode": estimate.mode,
        "precision": figures.printable(estimate.precision),
        "batch size": UNKNOWN if estimate.batch_size is None else str(estimate.batch_size),
        "parameters": figures.parameters(estimate),
        PEAK: figures.needed(estimate),
        "allocated (simulated)": format_size(estimate.allocated_peak_bytes),
        "CUDA context": figures.context(estimate),
        "activations": format_size(category.get(Category.ACTIVATION.value, 0)),
        "gradients": format_size(category.get(Category.GRADIENT.value, 0)),
        "optimizer state": format_size(category.get(Category.OPTIMIZER_STATE.value, 0)),
        "usable": figures.with_origin(estimate.capacity_bytes, estimate.device.usable_origin),
        "fits": figures.sure_cell(estimate),
        "time of a step (simulated)": figures.step_time(estimate),
        "samples per second (simulated)": figures.throughput(estimate),
        "host memory (assumed)": figures.host_total(estimate),
    }


def _saving(first: Estimate, other: Estimate) -> Text:

    before, after = first.peak_bytes, other.peak_bytes
    if after == before:
        return Text("no change")
    share = f" ({(after - before) / before:+.1%})" if before else ""
    sign, style = ("-", "green") if after < before else ("+", "red")
    return Text(f"{sign}{format_size(abs(after - before))}{share}", style=style)

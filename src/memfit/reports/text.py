"""The estimate as plain text: what `print(estimate)` shows.

Only the standard library and only ASCII of our own, so that it works in a light install, in a log file and in a
terminal of any encoding.
"""

from memfit.core.estimate import Estimate
from memfit.core.units import format_size
from memfit.reports import figures
from memfit.reports.figures import Row

NUM_TOP = 5
_NAME_WIDTH = 44
_BAR_WIDTH = 20


def format_estimate(estimate: Estimate) -> str:
    """The whole estimate as plain text, without colours and without a trailing newline."""
    lines = [figures.headline(estimate), figures.verdict(estimate), f"  {figures.bounds(estimate)}"]
    lost = figures.failure(estimate)
    if lost is not None:
        lines.append(f"  {lost}")
    peak_bytes, breakdown = estimate.peak_bytes, estimate.breakdown
    lines += ["", f"Peak {figures.printable(estimate.moment)}"]
    lines += [format_row(row, with_bar=True) for row in figures.rows(breakdown.by_category, peak_bytes)]
    lines += ["", f"Largest modules at the peak (top {NUM_TOP})"]
    lines += [format_row(row) for row in figures.top_rows(breakdown.by_module, peak_bytes, NUM_TOP)]
    lines += ["", f"Largest source lines at the peak (top {NUM_TOP})"]
    lines += [format_row(row) for row in figures.top_rows(breakdown.by_source, peak_bytes, NUM_TOP)]
    lines += ["", *_host(estimate), "", *_figures(estimate)]
    if estimate.notes:
        lines += ["", "Notes", *_notes(estimate)]
    return "\n".join(line.rstrip() for line in lines)


def format_row(row: Row, with_bar: bool = False) -> str:
    """A line of a breakdown, with a bar of its share where that is wanted."""
    name = figures.shorten(row.name, _NAME_WIDTH)
    bar = "#" * round(min(1.0, row.share) * _BAR_WIDTH) if with_bar else ""
    return f"  {name:<{_NAME_WIDTH}}{format_size(row.size_bytes):>10}{figures.format_share(row.share):>8}  {bar}"


def _host(estimate: Estimate) -> list[str]:
    lines = [f"Host memory: {figures.host_total(estimate)}"]
    for row in figures.rows(estimate.host.parts, estimate.host.total_bytes):
        lines.append(f"  {figures.shorten(row.name, _NAME_WIDTH):<{_NAME_WIDTH}}{format_size(row.size_bytes):>10}")
    return lines


def _figures(estimate: Estimate) -> list[str]:
    lines = [f"Figures and their origin ({figures.parameters(estimate)} parameters)"]
    for figure in figures.figures(estimate):
        origin = f"  {figure.origin}" if figure.origin else ""
        lines.append(f"  {figure.label:<34}{figure.value:>20}{origin}")
    return lines


def _notes(estimate: Estimate) -> list[str]:
    lines = []
    for note in estimate.notes:
        where = f" ({figures.printable(note.source)})" if note.source else ""
        lines.append(f"  {figures.printable(note.code)}: {figures.printable(note.text)}{where}")
    return lines

"""The parts of an estimate, and its plain text: what `print(estimate)` shows."""

from memfit.core.estimate import Estimate
from memfit.reports.estimate import figures
from memfit.reports.parts import Part, Report

_NUM_TOP = 5


def format_estimate(estimate: Estimate) -> str:
    """The whole estimate as plain text, without colours and without a trailing newline."""
    return f"{figures.headline(estimate)}\n{report(estimate)}"


def report(estimate: Estimate) -> Report:
    """Everything below the headline: verdict, breakdown, top modules and lines, host, figures, notes."""
    peak_bytes, breakdown, host = estimate.peak_bytes, estimate.breakdown, estimate.host
    lost = figures.failure(estimate)
    parts = [
        Part(
            f"Peak {figures.printable(estimate.moment)}",
            rows=tuple(figures.rows(breakdown.by_category, peak_bytes)),
            with_bar=True,
        ),
        Part(
            f"Largest modules at the peak (top {_NUM_TOP})",
            rows=tuple(figures.top_rows(breakdown.by_module, peak_bytes, _NUM_TOP)),
        ),
        Part(
            f"Largest source lines at the peak (top {_NUM_TOP})",
            rows=tuple(figures.top_rows(breakdown.by_source, peak_bytes, _NUM_TOP)),
        ),
        Part(
            f"Host memory: {figures.host_total(estimate)}",
            rows=tuple(figures.rows(host.parts, host.total_bytes)),
            with_share=False,
        ),
        Part(
            f"Figures and their origin ({figures.parameters(estimate)} parameters)",
            figures=tuple(figures.figures(estimate)),
        ),
    ]
    if estimate.notes:
        notes = [
            f"{figures.printable(note.code)}: {figures.printable(note.text)}"
            + (f" ({figures.printable(note.source)})" if note.source else "")
            for note in estimate.notes
        ]
        parts.append(Part("Notes", lines=tuple(notes), labelled=True))
    details = [figures.bounds(estimate), *([] if lost is None else [lost])]
    return Report(figures.verdict(estimate), details, parts, estimate.fits)

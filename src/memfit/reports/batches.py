"""What every report says about a search for the largest batch: a title, and a table of the sizes that were tried."""

from collections.abc import Sequence

from memfit.core.device import Device
from memfit.core.units import format_size
from memfit.reports import figures
from memfit.reports.parts import Grid, Line, format_grid


def title(chosen: int | None, device: Device) -> str:
    """The answer in a line."""
    usable = f"{format_size(device.usable_bytes)} usable on {figures.device_title(device)}"
    return f"No batch size fits: {usable}" if chosen is None else f"Largest batch size that fits: {chosen} ({usable})"


def grid(rows: Sequence[tuple[int, int, bool | None]], chosen: int | None, device: Device) -> Grid:
    """The batch sizes that were tried, as (batch size, peak bytes, fits), in order."""
    lines = [
        Line(
            (
                ">" if batch_size == chosen else "",
                str(batch_size),
                format_size(peak_bytes),
                figures.UNKNOWN if not device.usable_bytes else f"{peak_bytes / device.usable_bytes:.0%}",
                figures.yes_or_no(fits),
            )
        )
        for batch_size, peak_bytes, fits in sorted(rows, key=lambda row: row[0])
    ]
    return Grid(("", ">batch size", ">peak", ">of usable", ">fits"), tuple(lines))


def format_batches(rows: Sequence[tuple[int, int, bool | None]], chosen: int | None, device: Device) -> str:
    """Title and table as plain text."""
    return "\n".join([title(chosen, device), *(f"  {line}" for line in format_grid(grid(rows, chosen, device)))])

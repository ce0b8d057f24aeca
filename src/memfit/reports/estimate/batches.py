"""What every report says about a search for the largest batch: a title, and a table of the sizes that were tried."""

from collections.abc import Sequence

from memfit.core.device import Device
from memfit.core.units import format_size
from memfit.reports.estimate import figures
from memfit.reports.parts import Grid, Line, format_grid


def sizes(safe: int | None, limit: int | None) -> str:
    """The answer in a few words.

    Args:
        safe: the largest batch size that leaves room for what the estimate may be off by; None when none does.
        limit: the largest that fits; None when none does.
    """
    if limit is None:
        return "no batch size fits"
    if safe is None:
        return f"no batch size is safe; {limit} fits at the limit"
    return f"batch size {safe} is safe{'' if safe == limit else f'; {limit} is the limit'}"


def title(safe: int | None, limit: int | None, device: Device) -> str:
    """The answer in a line."""
    found = sizes(safe, limit)
    return (
        f"{found[0].upper()}{found[1:]} ({format_size(device.usable_bytes)} usable on {figures.device_title(device)})"
    )


def grid(rows: Sequence[tuple[int, int, bool | None]], safe: int | None, device: Device) -> Grid:
    """The batch sizes that were tried, as (batch size, peak bytes, fits), in order."""
    lines = [
        Line(
            (
                ">" if batch_size == safe else "",
                str(batch_size),
                format_size(peak_bytes),
                figures.UNKNOWN if not device.usable_bytes else f"{peak_bytes / device.usable_bytes:.0%}",
                _answer(batch_size, fits, safe),
            )
        )
        for batch_size, peak_bytes, fits in sorted(rows, key=lambda row: row[0])
    ]
    return Grid(("", ">batch size", ">peak", ">of usable", ">fits"), tuple(lines))


def format_batches(
    rows: Sequence[tuple[int, int, bool | None]], safe: int | None, limit: int | None, device: Device
) -> str:
    """Title and table as plain text."""
    return "\n".join([title(safe, limit, device), *(f"  {line}" for line in format_grid(grid(rows, safe, device)))])


def _answer(batch_size: int, fits: bool | None, safe: int | None) -> str:
    is_at_limit = fits and (safe is None or batch_size > safe)
    return "at the limit" if is_at_limit else figures.yes_or_no(fits)

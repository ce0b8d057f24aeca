"""What reports on data say: what a file holds, what a conversion did, how fast it streams."""

from collections.abc import Sequence

from memfit.core.units import format_size
from memfit.data.convert import Conversion, ConvertedField
from memfit.data.inspection import InspectedField, Inspection, Streaming
from memfit.data.speed import StreamSpeed
from memfit.reports.estimate.figures import UNKNOWN, printable
from memfit.reports.parts import Grid, Line, Part, Report
from memfit.reports.run.figures import duration

# From this share of a plain read on, the disk is as good as busy.
_CLOSE_TO_DISK = 0.7
_MEASURED = "measured"
_COMPUTED = "computed"
_MOST_CLASSES = 8


def count(number: float) -> str:
    """A number of things, with its thousands apart.

    >>> count(262144)
    '262,144'
    """
    return f"{number:,.0f}"


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.6g}"


def _several(number: float, what: str) -> str:
    return f"{count(number)} {what}" if count(number) == "1" else f"{count(number)} {what}s"


def inspection_report(inspection: Inspection) -> Report:
    """What a file holds, whether it could be loaded, how it is stored and how it will stream."""
    loaded, host = inspection.loaded_bytes, inspection.host_bytes
    verdict = f"{printable(inspection.name)}: {count(inspection.num_samples)} samples"
    is_loadable = None
    if loaded is None:
        verdict += " of different shapes"
    elif host is None:
        verdict += f", {format_size(loaded)} when loaded"
    else:
        is_loadable = loaded < host
        of = "the limit of this container" if inspection.is_limited else "the memory of this machine"
        verdict += (
            f", {format_size(loaded)} when loaded, {loaded / host:.0%} of {of} ({format_size(host)}, {_MEASURED})"
        )
    columns = ("field", "type", "shape of a sample", ">size", "values (a sample of them)")
    parts = [
        Part("Fields", grid=Grid(columns, tuple(map(_field_line, inspection.fields)))),
        Part("Stored", lines=tuple(_stored(inspection))),
        Part("Streamed", lines=() if inspection.streaming is None else _streamed(inspection.streaming)),
        Part("Worth changing", lines=tuple(map(printable, inspection.warnings))),
    ]
    return Report(verdict, [], [part for part in parts if part.holds_something], is_loadable)


def _field_line(field: InspectedField) -> Line:
    name = printable(field.name) + (" (label)" if field.is_label else "")
    shape = "differs" if field.is_ragged else str(list(field.shape)) if field.shape else "one number"
    values, seen = "", field.seen
    if seen is not None:
        values = f"{_number(seen.minimum)} to {_number(seen.maximum)} in {count(seen.num_values)}"
        for many, word in ((seen.num_nan, "NaN"), (seen.num_infinite, "infinite")):
            values += f", {count(many)} {word}" if many else ""
    return Line((name, field.dtype, shape, format_size(field.size_bytes), values))


def _stored(inspection: Inspection) -> list[str]:
    lines = [] if inspection.disk_bytes is None else [f"on disk: {format_size(inspection.disk_bytes)} ({_MEASURED})"]
    lines += map(printable, inspection.storage)
    if inspection.classes:
        lines.append(_classes(inspection.classes))
    for name, saved in inspection.savings.items():
        share = saved / inspection.loaded_bytes if inspection.loaded_bytes else 0.0
        lines.append(f"as {name} it would take {format_size(saved)} less ({share:.0%}, {_COMPUTED})")
    return lines


def _classes(names: Sequence[str]) -> str:
    shown = ", ".join(map(printable, names[:_MOST_CLASSES]))
    more = len(names) - _MOST_CLASSES
    return f"{len(names)} classes: {shown}" + (f" and {more} more" if more > 0 else "")


def _streamed(streaming: Streaming) -> tuple[str, ...]:
    lines = (
        f"with {format_size(streaming.memory_bytes)} of memory and batches of {streaming.batch_size} ({_COMPUTED}):",
        f"  {_several(streaming.num_blocks, 'block')} of about {format_size(streaming.block_bytes)}; "
        f"more than {_several(streaming.num_lanes, 'worker')} would read some of them twice",
        f"  the samples of {_several(streaming.blocks_per_window, 'block')} are shuffled with each other; "
        f"{streaming.neighbours_together:.2%} of samples are followed by one of the same block "
        f"({streaming.neighbours_at_best:.2%} in a full shuffle)",
    )
    return (*lines, "  after it was unpacked to a scratch folder, once") if streaming.is_unpacked_first else lines


def conversion_report(conversion: Conversion) -> Report:
    """The report of a conversion."""
    seconds = conversion.seconds
    speed = conversion.source_bytes / seconds if seconds and not conversion.resumed_at else None
    verdict = (
        f"{printable(conversion.destination)}: {count(conversion.num_samples)} samples, "
        f"{format_size(conversion.source_bytes)} to {format_size(conversion.destination_bytes)} in {duration(seconds)}"
        + ("" if speed is None else f", {format_size(round(speed))}/s")
    )
    details = []
    if conversion.resumed_at:
        details.append(f"went on after {count(conversion.resumed_at)} samples that an interrupted run had written")
    if conversion.classes:
        details.append(_classes(conversion.classes))
    columns = ("field", "from", "to", ">minimum", ">maximum", ">relative error", ">absolute error")
    lines = tuple(map(_converted_line, conversion.fields))
    # Values that were lost are no failure, but nobody should miss them.
    is_good = None if conversion.totals["num_overflow"] or conversion.totals["num_underflow"] else True
    return Report(verdict, details, [Part(f"Values ({_MEASURED}, all of them)", grid=Grid(columns, lines))], is_good)


def _converted_line(field: ConvertedField) -> Line:
    statistics = field.statistics
    errors = [f"{error:.3g}" for error in (statistics.max_relative_error, statistics.max_absolute_error)]
    counts = (
        (statistics.num_zeroed, f"became zero, too small for {field.dtype_after}"),
        (statistics.num_subnormal, "became subnormal, with fewer digits"),
        (statistics.num_overflow, f"became infinite, too large for {field.dtype_after}"),
        (statistics.num_nan, "were NaN before"),
        (statistics.num_infinite, "were infinite before"),
    )
    remarks = [f"{count(many)} of {count(statistics.num_values)} values {what}" for many, what in counts if many]
    if field.dtype_before == field.dtype_after:
        errors = ["none", "none"]
    cells = (field.dtype_before, field.dtype_after, _number(statistics.minimum), _number(statistics.maximum), *errors)
    return Line((printable(field.name), *cells), tuple(remarks))


def speed_report(speed: StreamSpeed) -> Report:
    """How fast it streams."""
    rate = f"{count(speed.rows_per_second)} samples/s"
    if speed.bytes_per_second is not None:
        rate += f", {format_size(round(speed.bytes_per_second))}/s"
    ratio = "" if speed.ratio is None else f", {speed.ratio:.2f} of a plain read"
    plain = speed.raw_bytes_per_second
    rows = (
        ("plain read of the same files", UNKNOWN if plain is None else f"{format_size(round(plain))}/s ({_MEASURED})"),
        ("time to the first batch", f"{speed.first_batch_seconds:.2f} s ({_MEASURED})"),
        ("most memory beside the program's", f"{format_size(speed.peak_bytes)} ({_MEASURED})"),
        ("budget", f"{format_size(speed.memory_bytes)} (given)"),
        ("batches", f"of {speed.batch_size}, workers: {speed.num_workers or 'none'}"),
        ("streamed", f"{count(speed.num_rows)} samples in {duration(speed.seconds)} ({_MEASURED})"),
        ("files", "dropped from the page cache before each" if speed.is_cold else "partly in the page cache"),
    )
    figures = Part("Figures", grid=Grid(("figure", "value"), tuple(map(Line, rows))))
    verdict = f"{printable(speed.name)}: {rate}{ratio} ({_MEASURED})"
    return Report(verdict, speed_judgement(speed), [figures], True)


def speed_judgement(speed: StreamSpeed) -> list[str]:
    """What the figures mean: which training it keeps up with, what limits it, and what may make it faster."""
    if not speed.rows_per_second:
        return []
    step = speed.batch_size / speed.rows_per_second
    takes = f"{step * 1000:.3g} ms" if step < 1 else f"{step:.3g} s"
    lines = [
        f"It keeps up with training whose steps take {takes} or more for a batch of {speed.batch_size}: then the "
        "device never waits for data. Faster steps wait."
    ]
    if speed.ratio is None:
        return lines
    if speed.ratio >= _CLOSE_TO_DISK:
        return [*lines, "Reading the files is what limits it: no workers make that faster; smaller files would."]
    why = "Making batches (unpacking, decoding, shuffling) is what limits it, not the reading"
    if not speed.is_cold:
        why += "; the plain read came from the page cache, which is faster than any disk"
    hint = (
        f"If your steps are faster than that, try --num-workers {2 * speed.num_workers or 2}, or a larger --memory; if "
        "not, nothing needs to be done."
    )
    return [*lines, f"{why}. {hint}"]

"""What reports on data say: what a file holds, what a conversion did, how fast it streams."""

from collections.abc import Sequence

from memfit.core.units import format_size
from memfit.data.convert import Conversion, ConvertedField
from memfit.data.inspection import InspectedField, Inspection, Streaming
from memfit.data.speed import Speed
from memfit.reports.figures import UNKNOWN, printable
from memfit.reports.parts import Grid, Line, Part
from memfit.reports.supervised_figures import duration

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


def number(value: float | None) -> str:
    """A value as people read it."""
    return UNKNOWN if value is None else f"{value:.6g}"


def inspection_verdict(found: Inspection) -> str:
    """The one line that says whether it could be loaded."""
    name, samples = printable(found.name), f"{count(found.num_samples)} samples"
    if found.loaded_bytes is None:
        return f"{name}: {samples} of different shapes"
    if found.host_bytes is None:
        return f"{name}: {samples}, {format_size(found.loaded_bytes)} when loaded"
    share = found.loaded_bytes / found.host_bytes
    of = "the limit of this container" if found.is_limited else "the memory of this machine"
    return (
        f"{name}: {samples}, {format_size(found.loaded_bytes)} when loaded, {share:.0%} of {of} "
        f"({format_size(found.host_bytes)}, {_MEASURED})"
    )


def is_loadable(found: Inspection) -> bool | None:
    """Whether all of it fits into memory; None where that isn't known."""
    if found.loaded_bytes is None or found.host_bytes is None:
        return None
    return found.loaded_bytes < found.host_bytes


def inspection_parts(found: Inspection) -> list[Part]:
    """Everything below the verdict."""
    columns = ("field", "type", "shape of a sample", ">size", "values (a sample of them)")
    parts = [
        Part("Fields", grid=Grid(columns, tuple(Line(tuple(field_row(field))) for field in found.fields))),
        Part("Stored", lines=tuple(_stored(found))),
        Part("Streamed", lines=tuple(_streamed(found.streaming)) if found.streaming is not None else ()),
        Part("Worth changing", lines=tuple(map(printable, found.warnings))),
    ]
    return [part for part in parts if part.holds_something]


def field_row(field: InspectedField) -> list[str]:
    """A field as the cells of a table."""
    name = printable(field.name) + (" (label)" if field.is_label else "")
    shape = "differs" if field.is_ragged else str(list(field.shape)) if field.shape else "one number"
    return [name, field.dtype, shape, format_size(field.size_bytes), _values(field)]


def _values(field: InspectedField) -> str:
    seen = field.seen
    if seen is None:
        return ""
    found = f"{number(seen.minimum)} to {number(seen.maximum)} in {count(seen.num_values)}"
    for many, word in ((seen.num_nan, "NaN"), (seen.num_infinite, "infinite")):
        if many:
            found += f", {count(many)} {word}"
    return found


def _stored(found: Inspection) -> list[str]:
    lines = [f"on disk: {format_size(found.disk_bytes)} ({_MEASURED})" if found.disk_bytes is not None else ""]
    lines += map(printable, found.storage)
    if found.classes:
        lines.append(_classes(found.classes))
    for name, saved in found.savings.items():
        share = saved / found.loaded_bytes if found.loaded_bytes else 0.0
        lines.append(f"as {name} it would take {format_size(saved)} less ({share:.0%}, {_COMPUTED})")
    return [line for line in lines if line]


def _classes(names: Sequence[str]) -> str:
    shown = ", ".join(map(printable, names[:_MOST_CLASSES]))
    more = len(names) - _MOST_CLASSES
    return f"{len(names)} classes: {shown}" + (f" and {more} more" if more > 0 else "")


def _several(number: float, what: str) -> str:
    return f"{count(number)} {what}" if count(number) == "1" else f"{count(number)} {what}s"


def _streamed(streaming: Streaming) -> list[str]:
    lines = [
        f"with {format_size(streaming.memory_bytes)} of memory and batches of {streaming.batch_size} ({_COMPUTED}):",
        f"  {_several(streaming.num_blocks, 'block')} of about {format_size(streaming.block_bytes)}; "
        f"more than {_several(streaming.num_lanes, 'worker')} would read some of them twice",
        f"  the samples of {_several(streaming.blocks_per_window, 'block')} are shuffled with each other; "
        f"{streaming.neighbours_together:.2%} of samples are followed by one of the same block "
        f"({streaming.neighbours_at_best:.2%} in a full shuffle)",
    ]
    if streaming.is_unpacked_first:
        lines.append("  after it was unpacked to a scratch folder, once")
    return lines


def conversion_verdict(done: Conversion) -> str:
    """The one line that says what a conversion came to."""
    speed = done.source_bytes / done.seconds if done.seconds and not done.resumed_at else None
    rate = "" if speed is None else f", {format_size(round(speed))}/s"
    return (
        f"{printable(done.destination)}: {count(done.num_samples)} samples, {format_size(done.source_bytes)} to "
        f"{format_size(done.destination_bytes)} in {duration(done.seconds)}{rate}"
    )


def conversion_details(done: Conversion) -> list[str]:
    """Lines below the verdict."""
    lines = []
    if done.resumed_at:
        lines.append(f"went on after {count(done.resumed_at)} samples that an interrupted run had written")
    if done.classes:
        lines.append(_classes(done.classes))
    return lines


def conversion_parts(done: Conversion) -> list[Part]:
    """Everything below the verdict and its lines."""
    columns = ("field", "from", "to", ">minimum", ">maximum", ">relative error", ">absolute error")
    lines = tuple(Line(tuple(_converted_row(field)), tuple(_remarks(field))) for field in done.fields)
    return [Part(f"Values ({_MEASURED}, all of them)", grid=Grid(columns, lines))]


def _converted_row(field: ConvertedField) -> list[str]:
    found = field.statistics
    is_same = field.dtype_before == field.dtype_after
    errors = ["none", "none"] if is_same else [f"{found.max_relative_error:.3g}", f"{found.max_absolute_error:.3g}"]
    extremes = [number(found.minimum), number(found.maximum)]
    return [printable(field.name), field.dtype_before, field.dtype_after, *extremes, *errors]


def _remarks(field: ConvertedField) -> list[str]:
    found = field.statistics
    told = (
        (found.num_zeroed, f"became zero, too small for {field.dtype_after}"),
        (found.num_subnormal, "became subnormal, with fewer digits"),
        (found.num_overflow, f"became infinite, too large for {field.dtype_after}"),
        (found.num_nan, "were NaN before"),
        (found.num_infinite, "were infinite before"),
    )
    return [f"{count(many)} of {count(found.num_values)} values {what}" for many, what in told if many]


def speed_verdict(found: Speed) -> str:
    """The one line that says how fast it streams."""
    rate = f"{count(found.rows_per_second)} samples/s"
    if found.bytes_per_second is not None:
        rate += f", {format_size(round(found.bytes_per_second))}/s"
    ratio = "" if found.ratio is None else f", {found.ratio:.2f} of a plain read"
    return f"{printable(found.name)}: {rate}{ratio} ({_MEASURED})"


def speed_judgement(found: Speed) -> list[str]:
    """What the figures mean: which training it keeps up with, what limits it, and what may make it faster."""
    if not found.rows_per_second:
        return []
    step = found.batch_size / found.rows_per_second
    lines = [
        f"It keeps up with training whose steps take {_step(step)} or more for a batch of {found.batch_size}: then the "
        "device never waits for data. Faster steps wait."
    ]
    if found.ratio is None:
        return lines
    if found.ratio >= _CLOSE_TO_DISK:
        return [
            *lines,
            "Reading the files is what limits it: no workers make that faster; smaller files would.",
        ]
    why = "Making batches (unpacking, decoding, shuffling) is what limits it, not the reading"
    if not found.is_cold:
        why += "; the plain read came from the page cache, which is faster than any disk"
    hint = (
        f"If your steps are faster than that, try --num-workers {2 * found.num_workers or 2}, or a larger --memory; if "
        "not, nothing needs to be done."
    )
    return [*lines, f"{why}. {hint}"]


def _step(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def speed_rows(found: Speed) -> Sequence[tuple[str, str]]:
    """Every figure with its origin."""
    plain = found.raw_bytes_per_second
    workers = "none" if not found.num_workers else str(found.num_workers)
    cold = "dropped from the page cache before each" if found.is_cold else "partly in the page cache"
    return (
        ("plain read of the same files", UNKNOWN if plain is None else f"{format_size(round(plain))}/s ({_MEASURED})"),
        ("time to the first batch", f"{found.first_batch_seconds:.2f} s ({_MEASURED})"),
        ("most memory beside the program's", f"{format_size(found.peak_bytes)} ({_MEASURED})"),
        ("budget", f"{format_size(found.memory_bytes)} (given)"),
        ("batches", f"of {found.batch_size}, workers: {workers}"),
        ("streamed", f"{count(found.num_rows)} samples in {duration(found.seconds)} ({_MEASURED})"),
        ("files", cold),
    )


def speed_parts(found: Speed) -> list[Part]:
    """Everything below the verdict."""
    lines = tuple(Line((label, value)) for label, value in speed_rows(found))
    return [Part("Figures", grid=Grid(("figure", "value"), lines))]

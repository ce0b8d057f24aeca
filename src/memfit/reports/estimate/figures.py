"""What every report says, before any of them decides how it looks.

The text, the terminal and the page must agree to the letter on the verdict, the shares and where each figure comes
from, so those are worked out once, here, from the estimate alone.
"""

from memfit.core.device import Device, Kind, Origin
from memfit.core.estimate import CACHED, CONTEXT, DRY_RUN, OTHER_PROCESSES, Estimate
from memfit.core.printing import printable as printable
from memfit.core.spread import COVERAGE
from memfit.core.timeline import Category
from memfit.core.units import format_seconds, format_size
from memfit.reports.parts import Figure as Figure
from memfit.reports.parts import Part, Report, Row

OVERHEADS = (CACHED, CONTEXT, OTHER_PROCESSES)
"""Rows of a breakdown that belong to no block of the timeline."""

UNKNOWN = "unknown"
SOFTWARE = "software"
INTERVAL = f"{COVERAGE:.0%} interval"
_NUM_TOP = 5


def format_count(count: int) -> str:
    """A count as people read it.

    >>> format_count(25_557_032), format_count(999), format_count(999_999)
    ('25.6 million', '999', '1.0 million')
    """
    for word, factor in (("billion", 10**9), ("million", 10**6)):
        if round(count / factor, 1) >= 1:
            return f"{count / factor:.1f} {word}"
    return f"{count:,}"


def package_version() -> str:
    """Version of the installed memfit, or "unknown" when it runs from a source tree."""
    # Slow to import, and only pages need it.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("memfit")
    except PackageNotFoundError:
        return UNKNOWN


def headline(estimate: Estimate) -> str:
    """What was estimated: model, mode, batch and precision."""
    batch = UNKNOWN if estimate.batch_size is None else str(estimate.batch_size)
    return printable(f"{estimate.subject}: {estimate.mode}, batch size {batch}, precision {estimate.precision}")


def device_title(device: Device) -> str:
    """The device's name as its maker writes it."""
    return printable(device.title or device.name)


def with_origin(size_bytes: int | None, origin: Origin) -> str:
    """A size and how it is known; "unknown" where it isn't."""
    return UNKNOWN if size_bytes is None else f"{format_size(size_bytes)} ({origin.value})"


def needed(estimate: Estimate) -> str:
    """What the device must provide, whether it can or not."""
    return ("at most " if estimate.is_at_most else "") + format_size(estimate.peak_bytes)


def answer(fits: bool | None) -> str:
    """Whether it fits, in words."""
    return {True: "fits", False: "does not fit", None: "whether it fits is unknown"}[fits]


def yes_or_no(fits: bool | None) -> str:
    """Whether it fits, in a cell of a table."""
    return {True: "yes", False: "no", None: UNKNOWN}[fits]


def sureness(estimate: Estimate) -> str:
    """How sure the answer is, rounded, such as "99%"; "" where there is none, or only an upper bound doesn't fit.

    Nothing is surer than 99%, and what is less sure isn't known to the percent.
    """
    return "" if estimate.fits is False and may_fit(estimate) else in_percent(estimate.fit_probability, estimate.fits)


def in_percent(probability: float | None, fits: bool | None) -> str:
    """How sure an answer is whose yes has a probability; "" where it isn't known.

    >>> in_percent(0.987, True), in_percent(0.94, True), in_percent(0.61, True), in_percent(0.3, False)
    ('99%', '94%', '60%', '70%')
    """
    if probability is None or fits is None:
        return ""
    percent = 100 * (probability if fits else 1 - probability)
    return "99%" if percent >= 98.5 else f"{max(50, 5 * round(percent / 5)) if percent < 92.5 else round(percent)}%"


def sure_answer(estimate: Estimate) -> str:
    """Whether it fits, how sure that is, and how near the limit is where that matters."""
    sure = sureness(estimate)
    if not sure:
        return "may not fit, depending on data" if estimate.fits is False else answer(estimate.fits)
    text = f"{answer(estimate.fits)} ({sure})"
    left = (estimate.capacity_bytes or 0) - estimate.peak_bytes
    if sure == "99%" or not left:
        return text
    return f"{text}: {format_size(abs(left))} {'below' if left > 0 else 'above'} the limit"


def sure_cell(estimate: Estimate) -> str:
    """Whether it fits, and how sure that is, in a cell of a table."""
    sure = sureness(estimate)
    return f"{yes_or_no(estimate.fits)}, {sure}" if sure else yes_or_no(estimate.fits)


def may_fit(estimate: Estimate) -> bool:
    """True if the step exceeds the device only by an upper bound."""
    capacity = estimate.capacity_bytes
    return estimate.is_at_most and capacity is not None and estimate.certain_bytes <= capacity


def demand(estimate: Estimate) -> str:
    """What is needed beside what there is."""
    usable = format_size(estimate.capacity_bytes)
    return f"{needed(estimate)} needed, {usable} usable on {device_title(estimate.device)}"


def verdict(estimate: Estimate) -> str:
    """The one line that answers the question, and how sure that is."""
    return f"{demand(estimate)}: {sure_answer(estimate)}"


def interval(estimate: Estimate) -> str:
    """The range that the need lies in in 95% of cases, such as "3.28 to 3.52 GiB"."""
    least, most = map(format_size, estimate.interval_bytes)
    unit = most.rpartition(" ")[2]
    return f"{least.removesuffix(f' {unit}')} to {most}"


def certainty(estimate: Estimate) -> str:
    """The interval, what it comes from for the most part, and what depends on data."""
    text = f"{INTERVAL} {interval(estimate)}"
    if estimate.all_spreads:
        widest = max(estimate.all_spreads, key=lambda spread: spread.below_bytes + spread.above_bytes)
        text += f", most of it for {printable(widest.name)}"
    if estimate.is_at_most:
        text += f"; at least {format_size(estimate.certain_bytes)}, depending on data"
    return text


def ranges(estimate: Estimate) -> tuple[str, ...]:
    """Each assumed part: how far off it may be, and how that is known."""
    lines = []
    for spread in estimate.all_spreads:
        below, above = (format_size(size) if size else "nothing" for size in (spread.below_bytes, spread.above_bytes))
        off = f"{below} more or less" if below == above else f"{below} less to {above} more"
        aside = "" if spread.decides else "; given up where memory is short"
        lines.append(printable(f"{spread.name}: {off} ({spread.source}{aside})"))
    return tuple(lines)


def failure(estimate: Estimate) -> str | None:
    """Where the step runs out of memory, or None when it doesn't."""
    lost = estimate.replay.out_of_memory
    if lost is None:
        return None
    held = f"{format_size(lost.allocated_bytes)} allocated and {format_size(lost.reserved_bytes)} reserved (simulated)"
    block = next((block for block in estimate.timeline.blocks if block.start == lost.tick), None)
    if block is None:
        return f"runs out when {format_size(lost.requested_bytes)} are requested, with {held}"
    return f"runs out {printable(estimate.moment_of(block))}, with {held}"


def rows(groups: dict[str, int], total_bytes: int) -> tuple[Row, ...]:
    """Lines of a breakdown, largest first, each with its share of `total_bytes`."""
    ordered = sorted(groups.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Row(printable(name), size, size / total_bytes if total_bytes else 0.0) for name, size in ordered)


def top_rows(groups: dict[str, int], total_bytes: int, num_rows: int) -> tuple[Row, ...]:
    """The largest lines of a breakdown that belong to the program, without context and allocator."""
    own = {name: size for name, size in groups.items() if name not in OVERHEADS}
    return rows(own, total_bytes)[:num_rows]


def parameters(estimate: Estimate) -> str:
    """How many parameters the model has; a count of 0 beside live parameters means that nobody counted."""
    if not estimate.num_parameters and any(b.category is Category.PARAMETER for b in estimate.timeline.blocks):
        return UNKNOWN
    return format_count(estimate.num_parameters)


def context(estimate: Estimate) -> str:
    """Memory of the CUDA context; only a device without CUDA has none."""
    if estimate.context_bytes:
        return format_size(estimate.context_bytes)
    return UNKNOWN if estimate.device.kind is Kind.CUDA else "none"


def figures(estimate: Estimate) -> list[Figure]:
    """Every headline figure with its origin."""
    simulated, assumed = Origin.SIMULATED.value, Origin.ASSUMED.value
    usable_origin = "" if estimate.capacity_bytes is None else estimate.device.usable_origin.value
    context_text, context_origin = context(estimate), estimate.device.context_origin.value
    return [
        Figure("needed on the device", needed(estimate), simulated),
        Figure("usable on the device", format_size(estimate.capacity_bytes), usable_origin),
        Figure("allocated at the peak", format_size(estimate.allocated_peak_bytes), simulated),
        Figure("reserved by the allocator", format_size(estimate.reserved_peak_bytes), simulated),
        Figure(CONTEXT, context_text, "" if context_text in (UNKNOWN, "none") else context_origin),
        Figure(INTERVAL, interval(estimate), assumed),
        *([] if estimate.time is None else [Figure("time of a step", step_time(estimate), estimate.time.origin.value)]),
        Figure("host memory", host_total(estimate), host_origin(estimate)),
        *([] if estimate.device.stack is None else [Figure(SOFTWARE, *software(estimate.device))]),
    ]


def step_time(estimate: Estimate) -> str:
    """How long a step takes, and the interval that it lies in; "unknown" where nobody knows."""
    time = estimate.time
    if time is None:
        return UNKNOWN
    within = f"{format_seconds(time.lower_seconds)} to {format_seconds(time.upper_seconds)}, 95%"
    return f"{format_seconds(time.seconds)} ({within})"


def throughput(estimate: Estimate) -> str:
    """Samples per second of a step after the other."""
    if estimate.time is None or estimate.batch_size is None:
        return UNKNOWN
    rate = estimate.batch_size / estimate.time.seconds
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def software(device: Device) -> tuple[str, str]:
    """(the versions of what runs on a device, whether they are the installed ones)."""
    return (UNKNOWN, "") if device.stack is None else device.stack.described(on_cuda=device.kind is Kind.CUDA)


def host_origin(estimate: Estimate) -> str:
    """How the memory of the host is known; "" where it isn't."""
    if not estimate.host.parts:
        return ""
    # A dry run is a real process, whose memory was measured.
    return (Origin.MEASURED if estimate.mode == DRY_RUN else Origin.ASSUMED).value


def host_total(estimate: Estimate) -> str:
    """What the host must hold; unknown when no part was worked out."""
    return format_size(estimate.host.total_bytes) if estimate.host.parts else UNKNOWN


def report(estimate: Estimate) -> Report:
    """Everything below the headline: verdict, breakdown, largest modules and lines, host, figures, notes."""
    peak_bytes, breakdown, host = estimate.peak_bytes, estimate.breakdown, estimate.host
    modules = top_rows(breakdown.by_module, peak_bytes, _NUM_TOP)
    sources = top_rows(breakdown.by_source, peak_bytes, _NUM_TOP)
    parts = [
        Part(f"Peak {printable(estimate.moment)}", rows=rows(breakdown.by_category, peak_bytes), with_bar=True),
        Part(f"Largest modules at the peak (top {_NUM_TOP})", rows=modules),
        Part(f"Largest source lines at the peak (top {_NUM_TOP})", rows=sources),
        Part(f"Host memory: {host_total(estimate)}", rows=rows(host.parts, host.total_bytes), with_share=False),
        Part(f"Figures and their origin ({parameters(estimate)} parameters)", figures=tuple(figures(estimate))),
        Part(f"How far off what is assumed may be, in {COVERAGE:.0%} of cases", lines=ranges(estimate)),
    ]
    if estimate.notes:
        notes = [f"{note.code}: {note.text}" + (f" ({note.source})" if note.source else "") for note in estimate.notes]
        parts.append(Part("Notes", lines=tuple(map(printable, notes)), labelled=True))
    out_of_memory = failure(estimate)
    details = [certainty(estimate), *([] if out_of_memory is None else [out_of_memory])]
    return Report(verdict(estimate), details, parts, estimate.fits)


def format_estimate(estimate: Estimate) -> str:
    """The whole estimate as plain text, as `print(estimate)` shows it."""
    return f"{headline(estimate)}\n{report(estimate)}"

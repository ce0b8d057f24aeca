"""What a file of samples holds, what loading it would cost and how it will stream: `memfit data inspect`.

Only headers are read, and a few blocks for a first look at the values.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.catalogue.host import cgroup_limit_bytes, host_memory_bytes
from memfit.core.errors import BadInput
from memfit.core.shown import Shown
from memfit.core.typed_data import Saved
from memfit.core.units import KIB, MIB, format_size, parse_size
from memfit.data.convert import paths_of, size_on_disk
from memfit.data.precision import ValueSummary
from memfit.data.source import Array, Layout, SampleSource, Source, Storage
from memfit.data.sources.joined import Passing
from memfit.data.sources.opening import open_source
from memfit.data.sources.tables import UnusableColumns
from memfit.data.stream import DEFAULTS, ArrayStream, StreamOptions

# The first look: so many runs of samples, evenly over the data, and no more bytes than this.
_NUM_LOOKS = 16
_LOOK_BYTES = 4 * MIB
# Where one read unpacks more than this, two looks have to do.
_COSTLY_BYTES = 32 * MIB
# Below this many blocks in a window, samples that lay side by side come near each other too often.
_FEW_BLOCKS = 64
_SMALL_FILE_BYTES = 16 * KIB
_NUM_FILES_WEIGHED = 1000
_MOST_NAMED = 40


@dataclass(frozen=True, slots=True)
class InspectedField:
    """A field."""

    name: str
    dtype: str  # as stored
    shape: tuple[int, ...]  # of one sample
    is_label: bool
    is_ragged: bool  # samples differ in shape
    size_bytes: int | None  # of all its samples in memory; None where they differ in shape
    seen: ValueSummary | None  # a first look at its values; None where they aren't numbers


@dataclass(frozen=True, slots=True)
class Streaming:
    """How it will stream."""

    memory_bytes: int  # the budget
    batch_size: int
    num_blocks: int  # runs of samples that are read as a whole
    block_bytes: int  # of an ordinary one, as stored
    num_lanes: int  # sequences of windows that take turns, and so the most workers that read no block twice
    window_bytes: int  # of samples that are shuffled with each other, as held
    blocks_per_window: float
    neighbours_together: float  # expected share of samples whose next one comes from the same block
    neighbours_at_best: float  # the same in a full shuffle
    is_unpacked_first: bool  # to a scratch folder


@dataclass(frozen=True, slots=True, repr=False)
class Inspection(Saved, Shown):
    """What is known of a file of samples without reading it."""

    saved_as = "inspection", "an inspection"

    name: str
    num_samples: int
    fields: tuple[InspectedField, ...]
    classes: tuple[str, ...]
    disk_bytes: int | None  # None where it isn't a local file
    loaded_bytes: int | None  # what loading it would take, as stored; None where samples differ in shape
    storage: tuple[str, ...]  # how it is stored, in words: chunks, row groups, compression
    host_bytes: int | None  # memory that a process can have here; None where the system doesn't say
    is_limited: bool  # whether that is the limit of a container, and not the machine's memory
    savings: dict[str, int]  # bytes that narrower types would save, by name of the type
    streaming: Streaming | None  # None where the budget doesn't allow it, which a warning says
    warnings: tuple[str, ...]  # what is worth changing

    def summary(self) -> str:
        """The file, its samples and the first of their fields."""
        first, others = self.fields[0], len(self.fields) - 1
        more = f" and {others} more" if others else ""
        return f"of {self.name}: {self.num_samples} samples of {first.name} {first.dtype} {list(first.shape)}{more}"

    def to_json(self) -> dict[str, Any]:
        """The result as JSON; sizes and shapes are measured, values are looked at in a sample of the data."""
        origins = {
            "disk_bytes": "measured",
            "loaded_bytes": "computed",
            "host_bytes": "measured",
            "seen": "sampled",
            "streaming": "computed",
        }
        return {**Saved.to_json(self), "origins": origins}


def inspect_data(
    source: Any,
    *,
    columns: Any = None,
    labels: Any = None,
    memory: str | int = "512MiB",
    batch_size: int = 32,
    options: StreamOptions = DEFAULTS,
) -> Inspection:
    """What a file of samples holds, what loading it would cost and how it will stream.

    Only headers are read, and a few blocks for a first look at the values.

    Args:
        source: as for `memfit.stream`.
        columns: as for `memfit.stream`.
        labels: as for `memfit.stream`.
        memory: the budget that it would be streamed with.
        batch_size: samples of a batch.
        options: of which `on_error` and `follow_links` count.

    Raises:
        BadInput: it can't be streamed.
        BadFile: it is damaged, or isn't there.
    """
    if batch_size < 1:
        raise BadInput(f"batch_size must be at least 1, but {batch_size} was given.")
    memory_bytes = parse_size(memory)
    opened, left_out = _open(source, columns, labels, options)
    paths = list(paths_of(source))
    try:
        streaming, problem = _streaming(opened, memory_bytes, batch_size)
        storage = opened.storage()
        host = host_memory_bytes()
        return Inspection(
            opened.name,
            opened.num_samples,
            _look(opened),
            opened.classes,
            size_on_disk(paths) or None,
            None if any(field.is_ragged for field in opened.fields) else opened.total_bytes,
            storage.lines,
            host,
            host is not None and host == cgroup_limit_bytes(),
            _savings(opened),
            streaming,
            (*filter(None, (left_out, problem)), *_warnings(opened, streaming, storage)),
        )
    finally:
        opened.close()


def _open(source: Any, columns: Any, labels: Any, options: StreamOptions) -> tuple[Source, str]:
    """The source, and what to say of columns that had to be left out: who looks at a table doesn't know them yet."""
    reading: dict[str, Any] = {"on_error": options.on_error, "follow_links": options.follow_links}
    try:
        return open_source(source, columns=columns, labels=labels, **reading), ""
    except UnusableColumns as error:
        # Columns of a dict or a pair are not those of one table.
        if columns is not None or not error.usable or not isinstance(source, str | os.PathLike | list):
            raise
        try:
            usable = open_source(source, columns=list(error.usable), labels=labels, **reading)
        except BadInput:
            raise error from None
        names = ", ".join(map(repr, error.usable[:_MOST_NAMED]))
        more = len(error.usable) - _MOST_NAMED
        return usable, f"left out here: {error} Looked at: {names}{f' and {more} more' if more > 0 else ''}."


def _savings(source: Source) -> dict[str, int]:
    wide = [field for field in source.fields if field.dtype.kind == "f" and not field.is_ragged]
    savings = {}
    for name, width in (("float32", 4), ("float16", 2)):
        per_sample = sum(
            field.sample_bytes - field.sample_bytes // field.dtype.itemsize * width
            for field in wide
            if field.dtype.itemsize > width
        )
        if per_sample * source.num_samples:
            savings[name] = per_sample * source.num_samples
    return savings


def _streaming(source: Source, memory_bytes: int, batch_size: int) -> tuple[Streaming | None, str]:
    """How it will stream; or None, and why it won't."""
    is_sequential = source.layout.is_sequential
    read = source
    if is_sequential:
        # As it will be once it is unpacked.
        read = Passing(source, source.fields)
        read.layout = Layout()
    try:
        stream = ArrayStream(read, batch_size=batch_size, memory_bytes=memory_bytes)
    except BadInput as error:
        return None, str(error)
    geometry, edges, num_samples = stream.geometry, read.layout.edges, source.num_samples
    if read.layout.is_by_sample:
        num_blocks = num_samples
    elif geometry.block_samples == 0 and edges is not None:
        num_blocks = -(-(len(edges) - 1) // geometry.num_merged)
    else:
        num_blocks = -(-num_samples // max(1, geometry.block_samples))
    block_samples = num_samples / max(1, num_blocks)
    window_samples = min(geometry.window_samples, num_samples)

    def same_block(num_shuffled: int) -> float:
        """Share of samples that are followed by one of their block where so many are shuffled with each other."""
        return 1.0 if num_shuffled < 2 else min(1.0, max(0.0, (block_samples - 1) / (num_shuffled - 1)))

    return Streaming(
        memory_bytes,
        batch_size,
        num_blocks,
        round(block_samples * source.sample_bytes),
        geometry.num_lanes,
        stream.window_bytes // max(1, geometry.num_windows_held),
        num_blocks if window_samples == num_samples else window_samples / block_samples,
        same_block(window_samples),
        same_block(num_samples),
        is_sequential,
    ), ""


def _look(source: Source) -> tuple[InspectedField, ...]:
    """The fields, with a first look at their values."""
    looks = list(_samples(source))
    return tuple(
        InspectedField(
            field.name,
            field.dtype.name,
            field.shape,
            field.is_label,
            field.is_ragged,
            None if field.is_ragged else source.num_samples * field.sample_bytes,
            seen([look[index] for look in looks]) if field.dtype.kind in "fiu" else None,
        )
        for index, field in enumerate(source.fields)
    )


def _samples(source: Source) -> Iterator[Sequence[Array]]:
    """Runs of samples, or single ones where each is a file, evenly over the data: one array a field."""
    num_looks, length = _NUM_LOOKS, 1
    if not source.layout.is_by_sample:
        if source.layout.scratch_bytes > _COSTLY_BYTES:
            num_looks = 2
        if source.layout.is_sequential:
            num_looks = 1
        length = max(1, _LOOK_BYTES // num_looks // max(1, source.sample_bytes))
    last = max(0, source.num_samples - length)
    for start in sorted({round(last * look / max(1, num_looks - 1)) for look in range(num_looks)}):
        if isinstance(source, SampleSource):
            sample = source.read_sample(start)
            if sample is not None:
                yield sample
            continue
        stop = min(start + length, source.num_samples)
        arrays = source.empty(stop - start)
        source.read(start, stop, arrays)
        source.drop(start, stop)
        yield arrays


def seen(arrays: Sequence[Array]) -> ValueSummary | None:
    """What some values of a field are like; None where there are none."""
    values = ValueSummary()
    with np.errstate(invalid="ignore"):
        for array in arrays:
            values.count(array)
    return values if values.num_values else None


def _warnings(source: Source, streaming: Streaming | None, storage: Storage) -> Iterator[str]:
    layout = source.layout
    if layout.is_sequential:
        yield (
            f"{layout.reason.rstrip('.')}. It is unpacked to a scratch folder ({format_size(source.total_bytes)}) "
            "when it is streamed for the first time; `memfit data convert` does that once and for all."
        )
    yield from storage.warnings
    if not storage.is_text and any(field.dtype.kind == "f" and field.dtype.itemsize > 4 for field in source.fields):
        yield (
            "stored as float64, twice what training in float32 uses: every epoch reads twice the bytes. "
            "`memfit data convert --dtype float32` halves the file and measures what that does to the numbers."
        )
    if isinstance(source, SampleSource):
        count = min(source.num_samples, _NUM_FILES_WEIGHED)
        mean = sum(map(source.stored_bytes, range(count))) / max(1, count)
        if mean < _SMALL_FILE_BYTES:
            remedy = "resize them to one shape and " if any(field.is_ragged for field in source.fields) else ""
            yield (
                f"{source.num_samples} files of {format_size(round(mean))} on average: opening them takes longer than "
                f"reading them. To read them faster, {remedy}put them into one file with `memfit data convert`."
            )
    # All of it in one window is a full shuffle, whatever its blocks are.
    elif streaming is not None and streaming.blocks_per_window < min(_FEW_BLOCKS, streaming.num_blocks):
        smaller = "" if layout.edges is None else ", or smaller chunks: `memfit data convert --chunk 256KiB`"
        yield (
            f"a window holds {streaming.blocks_per_window:.0f} blocks of {format_size(streaming.block_bytes)}, so "
            f"{streaming.neighbours_together:.1%} of samples are followed by one of the same block, against "
            f"{streaming.neighbours_at_best:.1%} in a full shuffle. More memory helps{smaller}."
        )

"""What a file of samples holds, what loading it would cost and how it will stream: `memfit data inspect`.

Only headers are read, and a few blocks for a first look at the values.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from memfit.catalogue.host import cgroup_limit_bytes, host_memory_bytes
from memfit.core.errors import BadInput
from memfit.core.units import KIB, MIB, format_size, parse_size
from memfit.data.convert import paths_of, size_on_disk
from memfit.data.source import Array, Field, Layout, SampleSource, Source
from memfit.data.sources.joined import Passing
from memfit.data.storage import Storage, storage_of
from memfit.data.stream import DEFAULTS, Stream, StreamOptions

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
class Seen:
    """Values of a field in a sample of the data.

    Attributes:
        num_values: that were looked at.
        minimum: least finite one; None where there is none.
        maximum: greatest finite one.
        num_nan: that are no number.
        num_infinite: that are infinite.
    """

    num_values: int
    minimum: float | None
    maximum: float | None
    num_nan: int
    num_infinite: int


@dataclass(frozen=True, slots=True)
class InspectedField:
    """A field.

    Attributes:
        name: of the field.
        dtype: as stored.
        shape: of one sample.
        is_label: whether it belongs to the labels.
        is_ragged: whether samples differ in shape.
        size_bytes: of all its samples in memory; None where they differ in shape.
        seen: a first look at its values; None where they aren't numbers.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_label: bool
    is_ragged: bool
    size_bytes: int | None
    seen: Seen | None


@dataclass(frozen=True, slots=True)
class Streaming:
    """How it will stream.

    Attributes:
        memory_bytes: the budget.
        batch_size: samples of a batch.
        num_blocks: runs of samples that are read as a whole.
        block_bytes: of an ordinary one, as stored.
        num_lanes: sequences of windows that take turns, and so the most workers that read no block twice.
        window_bytes: of samples that are shuffled with each other, as held.
        blocks_per_window: of these runs in a window.
        neighbours_together: expected share of samples whose next one comes from the same block.
        neighbours_at_best: the same in a full shuffle.
        is_unpacked_first: whether it is unpacked to a scratch folder before.
    """

    memory_bytes: int
    batch_size: int
    num_blocks: int
    block_bytes: int
    num_lanes: int
    window_bytes: int
    blocks_per_window: float
    neighbours_together: float
    neighbours_at_best: float
    is_unpacked_first: bool


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is known of a file of samples without reading it.

    Attributes:
        name: of the source.
        num_samples: in it.
        fields: of a sample.
        classes: names of its classes.
        disk_bytes: its size on disk; None where it isn't a local file.
        loaded_bytes: what loading all of it would take, as stored; None where samples differ in shape.
        storage: how it is stored, in words: chunks, row groups, compression.
        host_bytes: memory that a process can have here; None where the system doesn't say.
        is_limited: whether that is the limit of a container, and not the machine's memory.
        savings: bytes that narrower types would save, by name of the type.
        streaming: how it will stream; None where the budget doesn't allow it, which a warning says.
        warnings: what is worth changing.
    """

    name: str
    num_samples: int
    fields: tuple[InspectedField, ...]
    classes: tuple[str, ...]
    disk_bytes: int | None
    loaded_bytes: int | None
    storage: tuple[str, ...]
    host_bytes: int | None
    is_limited: bool
    savings: dict[str, int]
    streaming: Streaming | None
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain data; sizes and shapes are measured, a look at the values is of a sample of them."""
        origins = {
            "disk_bytes": "measured",
            "loaded_bytes": "computed",
            "host_bytes": "measured",
            "seen": "sampled",
            "streaming": "computed",
        }
        return {"format": "memfit inspection", "version": 1, "origins": origins, **asdict(self)}


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
        storage = storage_of(paths, opened.fields)
        warnings = [text for text in (left_out, problem) if text]
        host = host_memory_bytes()
        warnings += _warnings(opened, streaming, storage)
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
            _savings(opened.fields, opened.num_samples),
            streaming,
            tuple(warnings),
        )
    finally:
        opened.close()


def _open(source: Any, columns: Any, labels: Any, options: StreamOptions) -> tuple[Source, str]:
    """The source, and what to say of columns that had to be left out: who looks at a table doesn't know them yet."""
    from memfit.data.sources.opening import open_source
    from memfit.data.sources.tables import UnusableColumns

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


def _savings(fields: Sequence[Field], num_samples: int) -> dict[str, int]:
    found = {}
    for name in ("float32", "float16"):
        width = np.dtype(name).itemsize
        saved = sum(
            field.sample_bytes // field.dtype.itemsize * (field.dtype.itemsize - width) * num_samples
            for field in fields
            if field.dtype.kind == "f" and field.dtype.itemsize > width and not field.is_ragged
        )
        if saved:
            found[name] = saved
    return found


def _streaming(source: Source, memory_bytes: int, batch_size: int) -> tuple[Streaming | None, str]:
    """How it will stream; or None, and why it won't."""
    is_sequential = source.layout.is_sequential
    read = source
    if is_sequential:
        # As it will be once it is unpacked.
        read = Passing(source, source.fields)
        read.layout = Layout()
    try:
        stream = Stream(read, batch_size=batch_size, memory_bytes=memory_bytes)
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
    return Streaming(
        memory_bytes,
        batch_size,
        num_blocks,
        round(block_samples * source.sample_bytes),
        geometry.num_lanes,
        stream.window_bytes // max(1, geometry.num_windows_held),
        window_samples / block_samples,
        _same_block(block_samples, window_samples),
        _same_block(block_samples, num_samples),
        is_sequential,
    ), ""


def _same_block(block_samples: float, num_shuffled: int) -> float:
    """Share of samples that are followed by one of the same block where so many are shuffled with each other."""
    if num_shuffled < 2:
        return 1.0
    return min(1.0, max(0.0, (block_samples - 1) / (num_shuffled - 1)))


def _look(source: Source) -> tuple[InspectedField, ...]:
    """The fields, with a first look at their values."""
    parts: list[list[Array]] = [[] for _ in source.fields]
    if source.layout.is_by_sample:
        _look_at_samples(source, parts)
    else:
        _look_at_runs(source, parts)
    return tuple(
        InspectedField(
            field.name,
            field.dtype.name,
            field.shape,
            field.is_label,
            field.is_ragged,
            None if field.is_ragged else source.num_samples * field.sample_bytes,
            _seen([part.reshape(-1) for part in found]) if field.dtype.kind in "fiu" else None,
        )
        for field, found in zip(source.fields, parts, strict=True)
    )


def _look_at_runs(source: Source, parts: list[list[Array]]) -> None:
    num_looks = _NUM_LOOKS if source.layout.scratch_bytes <= _COSTLY_BYTES else 2
    if source.layout.is_sequential:
        num_looks = 1
    length = max(1, _LOOK_BYTES // num_looks // max(1, source.sample_bytes))
    last = max(0, source.num_samples - length)
    for start in sorted({round(last * look / max(1, num_looks - 1)) for look in range(num_looks)}):
        stop = min(start + length, source.num_samples)
        arrays = [np.empty((stop - start, *field.shape), field.dtype) for field in source.fields]
        source.read(start, stop, arrays)
        source.drop(start, stop)
        for part, array in zip(parts, arrays, strict=True):
            part.append(array)


def _look_at_samples(source: Source, parts: list[list[Array]]) -> None:
    assert isinstance(source, SampleSource)
    for sample in sorted({round((source.num_samples - 1) * look / (_NUM_LOOKS - 1)) for look in range(_NUM_LOOKS)}):
        for part, array in zip(parts, source.read_sample(sample) or (), strict=False):
            part.append(array)


def _seen(arrays: Sequence[Array]) -> Seen | None:
    if not arrays:
        return None
    values = np.concatenate(arrays)
    if values.dtype.kind == "f":
        finite = values[np.isfinite(values)]
        num_nan = int(np.count_nonzero(np.isnan(values)))
    else:
        finite, num_nan = values, 0
    low, high = (finite.min().item(), finite.max().item()) if finite.size else (None, None)
    return Seen(values.size, low, high, num_nan, values.size - finite.size - num_nan)


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
    if streaming is not None and not layout.is_by_sample and streaming.blocks_per_window < _FEW_BLOCKS:
        yield from _few_blocks(source, streaming)
    if layout.is_by_sample:
        yield from _small_files(source)


def _few_blocks(source: Source, streaming: Streaming) -> Iterator[str]:
    # All of it in one window is a full shuffle, whatever its blocks are.
    if streaming.blocks_per_window >= streaming.num_blocks:
        return
    smaller = "" if source.layout.edges is None else ", or smaller chunks: `memfit data convert --chunk 256KiB`"
    yield (
        f"a window holds {streaming.blocks_per_window:.0f} blocks of {format_size(streaming.block_bytes)}, so "
        f"{streaming.neighbours_together:.1%} of samples are followed by one of the same block, against "
        f"{streaming.neighbours_at_best:.1%} in a full shuffle. More memory helps{smaller}."
    )


def _small_files(source: Source) -> Iterator[str]:
    assert isinstance(source, SampleSource)
    count = min(source.num_samples, _NUM_FILES_WEIGHED)
    mean = sum(source.stored_bytes(sample) for sample in range(count)) / max(1, count)
    if mean < _SMALL_FILE_BYTES:
        remedy = "resize them to one shape and " if any(field.is_ragged for field in source.fields) else ""
        yield (
            f"{source.num_samples} files of {format_size(round(mean))} on average: opening them takes longer than "
            f"reading them. To read them faster, {remedy}put them into one file with `memfit data convert`."
        )

import errno
import threading

import numpy as np
import pytest

from memfit.core.errors import BadFile, BadInput
from memfit.data import transfer as transfers
from memfit.data.journal import Journal
from memfit.data.source import Field, Layout, SampleSource, Source
from memfit.data.transfer import Overflow, Transfer, free_bytes
from memfit.data.writing import _NpyWriter, plan_target


class ArraySource(Source):
    """Samples of an array in memory."""

    name = "array"
    classes = ()
    layout = Layout()

    def __init__(self, array, fails_at=None):
        self._array = array
        self._fails_at = fails_at
        self.fields = (Field("x", array.dtype, array.shape[1:]),)
        self.num_samples = len(array)
        self.reads = []

    def fingerprint(self):
        return f"{self._array.shape}"

    def read(self, start, stop, out):
        if self._fails_at is not None and stop > self._fails_at:
            raise OSError(errno.EIO, "Input/output error")
        self.reads.append((start, stop))
        out[0][...] = self._array[start:stop]

    def drop(self, start, stop):
        pass

    def close(self):
        pass


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """The journal tells of each block that is forced to disk."""
    monkeypatch.setattr(transfers, "_JOURNAL_SECONDS", 0.0)


def transfer(source, path, dtype="f4", block=8, **options):
    fields = tuple(Field(f.name, np.dtype(dtype), f.shape) for f in source.fields)
    chunk = block * fields[0].sample_bytes
    target = plan_target(path, fields, source.num_samples, chunk_bytes=chunk)
    return Transfer(source, target, Journal(path), {"test": 1}, sync_bytes=1, **options)


VALUES = np.random.default_rng(0).standard_normal((100, 3))


def test_all_samples_arrive(tmp_path):
    seen = []
    source = ArraySource(VALUES)

    statistics, resumed_at = transfer(source, tmp_path / "x.npy", progress=lambda *each: seen.append(each)).run()

    assert np.array_equal(np.load(tmp_path / "x.npy"), VALUES.astype("f4"))
    assert resumed_at == 0
    assert statistics[0].num_values == 300
    assert seen[-1] == (2400, 2400)
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]
    own = ("memfit-read", "memfit-write", "memfit-sync")
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(own)]


def test_no_samples_are_a_file_too(tmp_path):
    transfer(ArraySource(VALUES[:0]), tmp_path / "x.npy").run()

    assert np.load(tmp_path / "x.npy").shape == (0, 3)


def interrupt_after(monkeypatch, num_writes, error):
    real = _NpyWriter.write
    calls = []

    def write(self, start, arrays):
        calls.append(start)
        if len(calls) > num_writes:
            raise error
        real(self, start, arrays)

    monkeypatch.setattr(_NpyWriter, "write", write)


def test_an_interrupted_transfer_goes_on(tmp_path, monkeypatch):
    # GIVEN a transfer that is interrupted after five blocks
    interrupt_after(monkeypatch, 5, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        transfer(ArraySource(VALUES), tmp_path / "x.npy").run()
    assert not (tmp_path / "x.npy").exists()
    monkeypatch.undo()

    # WHEN the same is run again
    source = ArraySource(VALUES)
    statistics, resumed_at = transfer(source, tmp_path / "x.npy").run()

    # THEN what was on disk isn't read again, and the result is that of an uninterrupted one
    assert resumed_at in (32, 40)
    assert source.reads[0][0] == resumed_at
    assert np.array_equal(np.load(tmp_path / "x.npy"), VALUES.astype("f4"))
    assert (statistics, 0) == transfer(ArraySource(VALUES), tmp_path / "y.npy").run()


def test_an_unfinished_file_of_another_source_is_refused_or_discarded(tmp_path, monkeypatch):
    interrupt_after(monkeypatch, 5, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        transfer(ArraySource(VALUES), tmp_path / "x.npy").run()
    monkeypatch.undo()

    with pytest.raises(BadInput, match=r"unfinished file of another conversion"):
        transfer(ArraySource(VALUES[:50]), tmp_path / "x.npy").run()
    _, resumed_at = transfer(ArraySource(VALUES[:50]), tmp_path / "x.npy", discard_other=True).run()

    assert resumed_at == 0
    assert np.array_equal(np.load(tmp_path / "x.npy"), VALUES[:50].astype("f4"))


@pytest.mark.parametrize("broken", [{"statistics": 3}, {"statistics": [{"a": 1}]}, {"num_durable": None}])
def test_a_journal_that_makes_no_sense_is_not_believed(tmp_path, monkeypatch, broken):
    interrupt_after(monkeypatch, 5, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        transfer(ArraySource(VALUES), tmp_path / "x.npy").run()
    monkeypatch.undo()
    journal = Journal(tmp_path / "x.npy")
    journal.write({**journal.read(), **broken})

    assert transfer(ArraySource(VALUES), tmp_path / "x.npy").run()[1] == 0


def test_a_full_disk_keeps_what_is_done(tmp_path, monkeypatch):
    interrupt_after(monkeypatch, 5, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(BadFile, match=r"the disk is full. What is done is kept in .*make room and run the same again"):
        transfer(ArraySource(VALUES), tmp_path / "x.npy").run()
    assert not (tmp_path / "x.npy").exists()
    monkeypatch.undo()

    assert transfer(ArraySource(VALUES), tmp_path / "x.npy").run()[1] > 0


def test_a_disk_that_is_full_at_once_leaves_nothing(tmp_path, monkeypatch):
    interrupt_after(monkeypatch, 0, OSError(errno.ENOSPC, "No space left on device"))

    with pytest.raises(BadFile, match=r"the disk is full. The unfinished file was removed. Make room for 1\.17 KiB"):
        transfer(ArraySource(VALUES), tmp_path / "x.npy").run()

    assert list(tmp_path.iterdir()) == []


def test_a_source_that_cannot_be_read_leaves_nothing(tmp_path):
    with pytest.raises(BadFile, match=r"array can't be read at sample 48: Input/output error"):
        transfer(ArraySource(VALUES, fails_at=50), tmp_path / "x.npy").run()

    assert list(tmp_path.iterdir()) == []


def test_an_overflow_is_refused_with_the_first_value_and_their_number(tmp_path):
    values = VALUES.copy()
    values[20, 1], values[90, 2] = 1e39, -1e300

    with pytest.raises(Overflow, match=r"sample 20 holds 1e\+39, .* and 2 of 300 values would become infinite"):
        transfer(ArraySource(values), tmp_path / "x.npy").run()
    assert list(tmp_path.iterdir()) == []

    statistics, _ = transfer(ArraySource(values), tmp_path / "x.npy", allow_overflow=True).run()
    assert statistics[0].num_overflow == 2
    assert np.isinf(np.load(tmp_path / "x.npy")).sum() == 2


def test_overflows_are_counted_for_a_while_only(tmp_path, monkeypatch):
    monkeypatch.setattr(transfers, "_COUNT_SECONDS", 0.0)
    values = np.full((100, 3), 1e300)

    with pytest.raises(Overflow, match=r"at least 24 values, in the first 8 of 100 samples, would"):
        transfer(ArraySource(values), tmp_path / "x.npy").run()


def test_errors_that_are_nobody_elses_are_not_hidden(tmp_path, monkeypatch):
    interrupt_after(monkeypatch, 1, RuntimeError("a mistake"))

    with pytest.raises(RuntimeError, match=r"a mistake"):
        transfer(ArraySource(VALUES), tmp_path / "x.npy").run()


class SampleArrays(SampleSource):
    layout = Layout(is_by_sample=True)

    def __init__(self, samples):
        first = np.asarray(samples[0])
        self.name = "folder"
        self.fields = (Field("x", first.dtype, first.shape),)
        self._samples = samples
        self.num_samples = len(samples)

    def fingerprint(self):
        return "folder"

    def read_sample(self, sample):
        value = self._samples[sample]
        return None if value is None else (np.asarray(value),)

    def stored_bytes(self, sample):
        return 8

    def sample_name(self, sample):
        return f"{sample}.png"


def test_samples_are_read_one_by_one_where_they_are_files(tmp_path):
    transfer(SampleArrays([[1.0, 2], [3, 4]]), tmp_path / "x.npy").run()

    assert np.load(tmp_path / "x.npy").tolist() == [[1, 2], [3, 4]]


def test_samples_of_other_shapes_and_gaps_are_refused():
    out = [np.empty((2, 2))]
    with pytest.raises(BadInput, match=r"samples differ in shape: 1.png is \[3\], and the first one is \[2\]"):
        SampleArrays([[1.0, 2], [3, 4, 5]]).read(0, 2, out)
    with pytest.raises(BadFile, match=r"1.png can't be read"):
        SampleArrays([[1.0, 2], None]).read(0, 2, out)


def test_room_is_that_of_the_nearest_folder(tmp_path):
    assert free_bytes(tmp_path / "a" / "b") == pytest.approx(free_bytes(tmp_path), rel=0.5)

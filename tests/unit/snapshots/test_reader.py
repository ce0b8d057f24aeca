import bz2
import gzip
import io
import lzma
import os
import pickle
import re
import subprocess
import sys
import zipfile

import pytest

from memfit.core.errors import BadFile
from memfit.snapshots.reader import StackFrame, read_snapshot


class RunsCode:
    def __reduce__(self):
        return (os.system, ("echo no",))


def event(action="alloc", address=4096, size=100, **more):
    return {"action": action, "addr": address, "size": size, "stream": 0, **more}


def content(*traces):
    frames = [{"name": "f", "filename": "a.py", "line": 3}]
    block = {"address": 4096, "size": 512, "requested_size": 100, "state": "active_allocated", "frames": frames}
    rest = {"address": 4608, "size": 2096640, "requested_size": 0, "state": "inactive"}
    segment = {
        "device": 0,
        "address": 4096,
        "total_size": 2097152,
        "stream": 0,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": [block, rest],
    }
    return {"segments": [segment], "device_traces": list(traces), "allocator_settings": {"max_split_size": -1}}


@pytest.fixture
def write(tmp_path):
    def write(value, name="one.pickle", pack=bytes):
        path = tmp_path / name
        path.write_bytes(pack(pickle.dumps(value)))
        return path

    return write


def zipped(data, name="one.pickle", **more):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for other, content_of_other in more.items():
            archive.writestr(other, content_of_other)
        archive.writestr(name, data)
    return file.getvalue()


def saved_by_torch(data):
    return zipped(data, "archive/data.pkl", **{"archive/version": b"3"})


@pytest.mark.parametrize("pack", [bytes, lzma.compress, gzip.compress, bz2.compress, zipped, saved_by_torch])
def test_events_segments_and_settings(write, pack):
    # GIVEN a snapshot, compressed or not
    frames = [
        {"name": "at::empty", "filename": "??", "line": 0},
        {"name": "step", "filename": "train.py", "line": 7},
    ]
    path = write(content([event(frames=frames), event("oom", None, 5)]), pack=pack)

    # WHEN it is read
    snapshot = read_snapshot(path)

    # THEN everything is in it
    first, second = snapshot.history()
    assert (first.action, first.address, first.size_bytes, first.stream, first.device) == ("alloc", 4096, 100, 0, 0)
    assert first.frames == (StackFrame("at::empty", "??", 0), StackFrame("step", "train.py", 7))
    assert [frame.is_python for frame in first.frames] == [False, True]
    assert (second.action, second.address, second.frames) == ("oom", None, ())
    (segment,) = snapshot.segments
    assert (segment.total_bytes, segment.pool, segment.kind) == (2097152, (0, 0), "small")
    assert [(block.address, block.is_allocated) for block in segment.blocks] == [(4096, True), (4608, False)]
    assert segment.blocks[0].frames == (StackFrame("f", "a.py", 3),)
    assert snapshot.settings == {"max_split_size": -1}
    assert snapshot.devices == (0,)


def test_old_files_without_addresses_of_blocks(write):
    value = content([event()])
    for block in value["segments"][0]["blocks"]:
        del block["address"], block["requested_size"]
    del value["allocator_settings"]

    (segment,) = read_snapshot(write(value)).segments

    assert [(block.address, block.requested_bytes) for block in segment.blocks] == [(4096, 512), (4608, 2096640)]


def test_no_history(write):
    for snapshot in (read_snapshot(write(content())), read_snapshot(write(content([], [])))):
        with pytest.raises(BadFile, match=r"has no history: .*_record_memory_history"):
            snapshot.history()


def test_several_devices(write):
    snapshot = read_snapshot(write(content([event()], [], [event(size=7), event(address=8192)])))

    assert snapshot.devices == (0, 2)
    assert [one.size_bytes for one in snapshot.history(2)] == [7, 100]
    with pytest.raises(
        BadFile, match=re.escape("(0: 1 allocations; 2: 2 allocations). Name one of them: `--history 2`")
    ):
        snapshot.history()
    with pytest.raises(BadFile, match=r"no history of device 1; it has that of 0, 2"):
        snapshot.history(1)


def test_a_device_that_was_only_looked_at_has_no_history(write):
    # GIVEN a second device, of which two snapshots were made and nothing else
    snapshot = read_snapshot(write(content([event()], [event("snapshot", 0, 0), event("user_defined", 0, 0)])))

    assert len(snapshot.history()) == 1
    with pytest.raises(BadFile, match=r"no history of device 1; it has that of 0\."):
        snapshot.history(1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"hello, this is text", "it is no pickle"),
        (pickle.dumps(content([event()]))[:-40], "is cut off"),
        (lzma.compress(pickle.dumps(content([event()])))[:-40], "is cut off or damaged"),
        (gzip.compress(pickle.dumps(content([event()])))[:-20], "is cut off or damaged"),
        (zipped(b"", "a", b=b""), "a zip of 2 files, and one snapshot was expected. Unpack it first"),
        (zipped(pickle.dumps(content()))[:-40], "is cut off or damaged"),
        (bz2.compress(pickle.dumps(content()))[:-10], "is cut off or damaged"),
        (pickle.dumps([1, 2]), "a dictionary with 'segments'"),
        (pickle.dumps(content()["segments"]), r"has no history: it is what `torch.cuda.memory_snapshot\(\)` returns"),
        (pickle.dumps(content([event(size=1 << 100)])), "a number of 64 bits was expected"),
        (pickle.dumps({"segments": [], "device_traces": [[event()] * 9] * 999}), "hold more events and blocks"),
        (pickle.dumps({"segments": [{"device": 0}]}), "in a form that isn't known"),
        (pickle.dumps({"segments": [], "device_traces": [[{"addr": 1}]]}), "in a form that isn't known"),
        (pickle.dumps(content([RunsCode()])), r"would load \w+\.system"),
    ],
)
def test_bad_files(tmp_path, data, message):
    path = tmp_path / "bad.pickle"
    path.write_bytes(data)

    with pytest.raises(BadFile, match=message):
        read_snapshot(path)


def test_a_file_that_unpacks_to_too_much(write):
    path = write(content([event()] * 1000), pack=lzma.compress)

    with pytest.raises(BadFile, match=r"more than 1\.00 KiB"):
        read_snapshot(path, max_bytes=1024)


def test_what_is_no_file(tmp_path):
    with pytest.raises(BadFile, match=r"can't read .*No such file"):
        read_snapshot(tmp_path / "missing.pickle")
    with pytest.raises(BadFile, match=r"can't read .*a directory"):
        read_snapshot(tmp_path)


def test_a_file_is_read_within_little_memory_and_too_large_a_one_is_told_of(tmp_path):
    (tmp_path / "small.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": []}))
    with lzma.open(tmp_path / "large.pickle", "wb", preset=0) as file:
        for _ in range(8):
            file.write(bytes(128 * 2**20))
    # 1 GiB of addresses, the interpreter's own included.
    script = """
import resource
from memfit.core.errors import BadFile
from memfit.snapshots.reader import read_snapshot
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
read_snapshot("small.pickle")
try:
    read_snapshot("large.pickle")
except BadFile as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert "holds more than this process has memory for. Record fewer events" in run.stdout, run.stderr

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from memfit.core.errors import BadFile
from memfit.data.sources import spool
from memfit.data.sources.npz import NpzSource
from memfit.data.sources.spool import SpooledSource, spooled

SOURCE = str(Path(__file__).parents[4] / "src")
X, Y = np.random.default_rng(0).standard_normal((300, 4)), np.arange(300) % 5


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_SPOOL", str(tmp_path / "spool"))
    np.savez_compressed(tmp_path / "data.npz", x=X, y=Y)
    return NpzSource(tmp_path / "data.npz")


def read(source, start, stop):
    out = [np.empty((stop - start, *field.shape), field.dtype) for field in source.fields]
    source.read(start, stop, out)
    source.drop(start, stop)
    source.close()
    return out


def test_samples_can_be_read_from_anywhere(source, capsys):
    unpacked = spooled(source)

    assert not unpacked.layout.is_sequential
    assert (unpacked.name, unpacked.fields, unpacked.num_samples) == (source.name, source.fields, 300)
    assert (unpacked.classes, unpacked.fingerprint()) == (source.classes, source.fingerprint())
    x, y = read(unpacked, 250, 280)
    assert np.array_equal(x, X[250:280])
    assert np.array_equal(y, Y[250:280])
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("memfit: unpacking ")
    assert "11.7 KiB, once" in told


def test_it_is_unpacked_once(tmp_path, source, capsys):
    spooled(source)
    assert capsys.readouterr().err.startswith("memfit: unpacking ")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = spooled(source)

    assert isinstance(again, SpooledSource)
    assert capsys.readouterr().err == ""
    assert len(list((tmp_path / "spool").iterdir())) == 1


def test_changed_data_gets_a_place_of_its_own(tmp_path, source):
    spooled(source)
    np.savez_compressed(tmp_path / "data.npz", x=X + 1, y=Y)
    changed = NpzSource(tmp_path / "data.npz")

    assert np.array_equal(read(spooled(changed), 0, 3)[0], X[:3] + 1)
    assert len(list((tmp_path / "spool").iterdir())) == 2


def test_a_damaged_spool_is_made_again(source):
    unpacked = spooled(source)
    unpacked.paths[0].write_bytes(unpacked.paths[0].read_bytes()[:200])

    assert np.array_equal(read(spooled(source), 0, 300)[0], X)


def test_the_folder_is_that_of_the_environment(tmp_path, source, monkeypatch):
    monkeypatch.setenv("MEMFIT_SPOOL", str(tmp_path / "elsewhere"))

    unpacked = spooled(source)

    assert unpacked.paths[0].parent == tmp_path / "elsewhere" / source.fingerprint()
    description = json.loads((unpacked.paths[0].parent / "memfit.json").read_text())
    assert description == {"name": source.name, "classes": [], "bytes": 300 * 40}


def test_a_disk_without_room_is_named(source, monkeypatch):
    monkeypatch.setattr(spool, "free_bytes", lambda path: 100)

    with pytest.raises(BadFile, match=r"That takes 11\.7 KiB, and .* has 100 B left. .* set MEMFIT_SPOOL"):
        spooled(source)


def test_a_folder_that_can_not_be_written_is_named(tmp_path, source, monkeypatch):
    monkeypatch.setenv("MEMFIT_SPOOL", str(tmp_path / "data.npz" / "spool"))

    with pytest.raises(BadFile, match=r"can't be written to: Not a directory. Set MEMFIT_SPOOL"):
        spooled(source)


RANK = """
import sys
from memfit.data.sources.npz import NpzSource
from memfit.data.sources.spool import spooled
print(spooled(NpzSource(sys.argv[1])).num_samples)
"""


def test_several_processes_unpack_it_once(tmp_path, source):
    command = [sys.executable, "-c", RANK, tmp_path / "data.npz"]
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]

    written = [process.communicate(timeout=60) for process in processes]

    assert [output for output, _ in written] == ["300\n"] * 3
    assert sum("unpacking" in error for _, error in written) == 1
    assert [path.name for path in (tmp_path / "spool").iterdir()] == [source.fingerprint()]

"""Tests of memfit.data.sources.skipped."""

import gc
import os
import pickle
import subprocess
import sys
import tempfile

import pytest

from memfit.data.sources.skipped import SkippedSamples

_ADD = """
import pickle, sys
skipped = pickle.loads(bytes.fromhex(sys.argv[1]))
skipped.add(7)
skipped.add(2)
"""


def test_samples_are_counted_once():
    skipped = SkippedSamples()
    assert skipped.numbers().tolist() == []
    for sample in (3_000_000, 5, 5):
        skipped.add(sample)
    assert skipped.numbers().tolist() == [5, 3_000_000]


def test_processes_that_are_started_anew_count_too():
    # GIVEN a process that knows it by a pickle
    skipped = SkippedSamples()
    skipped.add(2)
    subprocess.run([sys.executable, "-c", _ADD, pickle.dumps(skipped).hex()], check=True)
    # THEN what it left out is known here, and its end removed nothing
    assert skipped.numbers().tolist() == [2, 7]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system doesn't fork")
def test_forked_processes_count_too():
    skipped = SkippedSamples()
    child = os.fork()
    if not child:
        skipped.add(4)
        del skipped
        os._exit(0)
    os.waitpid(child, 0)
    assert skipped.numbers().tolist() == [4]


def test_the_file_goes_with_the_object(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    skipped = SkippedSamples()
    skipped.add(1)
    assert len(os.listdir(tmp_path)) == 1
    del skipped
    gc.collect()
    assert os.listdir(tmp_path) == []


def test_without_a_folder_to_write_to_this_process_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    skipped = SkippedSamples()
    skipped.add(9)
    skipped.add(1)
    assert skipped.numbers().tolist() == [1, 9]
    assert pickle.loads(pickle.dumps(skipped)).numbers().tolist() == []

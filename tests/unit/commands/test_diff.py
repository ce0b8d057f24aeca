import json
import os
import pickle
import re

import pytest

import memfit
from memfit.commands import main
from tests import jobs
from tests.snapshot_files import written


@pytest.fixture
def snapshot(tmp_path):
    timeline = memfit.estimate(jobs.conv_job(), device="rtx-3090").timeline
    return str(written(timeline, tmp_path / "snapshot.pickle"))


def test_text_and_page(snapshot, script, tmp_path, capsys):
    page = tmp_path / "diff.html"

    assert main(["diff", snapshot, "-d", "rtx-3090", "--html", str(page), "--job", f"{script}:job"]) == 0

    written_text = capsys.readouterr().out
    assert "(100.00%) are simulated" in written_text
    assert f"page written to {page}" in written_text
    assert page.read_text().startswith("<!doctype html>")


def test_json(snapshot, script, capsys):
    assert main(["diff", snapshot, "-d", "rtx-3090", "--json", "--job", f"{script}:job"]) == 0

    document = json.loads(capsys.readouterr().out)
    assert (document["format"], document["num_missing"], document["groups"]) == ("memfit.diff", 0, [])


class Hostile:
    def __reduce__(self):
        return os.system, ("echo ran",)


HISTORY = [{"action": "alloc", "addr": 512, "size": 100, "stream": 0}]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ({"segments": [], "device_traces": []}, [], "has no history.*_record_memory_history"),
        ({"segments": [], "device_traces": [HISTORY, HISTORY]}, [], r"several devices \(0: 1 alloc.*--history 0"),
        ({"segments": [], "device_traces": [HISTORY, HISTORY]}, ["--history", "5"], "no history of device 5"),
        ({"segments": [], "device_traces": Hostile()}, [], "would load .*system.*Nothing was run"),
        ([1, 2], [], "snapshot"),
        (None, [], "snapshot"),
    ],
)
def test_snapshots_that_cannot_be_compared(tmp_path, script, capsys, content, options, message):
    path = tmp_path / "bad.pickle"
    path.write_bytes(b"\x80garbage" if content is None else pickle.dumps(content))

    assert main(["diff", str(path), "-d", "t4", *options, "--job", f"{script}:job"]) == 2

    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--script train.py ARGS..., or --job"),
        (["--job", "x.py:job", "--script", "x.py"], "is needed, once"),
        (["--steps", "0", "--script", "x.py"], "--steps must be at least 1"),
        (["--steps", "3", "--job", "x.py:job"], "--steps is for a script"),
        (["--script", "-m"], "-m takes the name of a module"),
        (["--script", "train.py", "--device", "t4"], "--device came after the script"),
        (["-d", "t4,a10g", "--job", "x.py:job"], "one device"),
    ],
)
def test_bad_usage(snapshot, capsys, words, message):
    assert main(["diff", snapshot, *words]) == 2

    assert message in capsys.readouterr().err

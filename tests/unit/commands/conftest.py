import sys

import pytest

SCRIPT = """
import torch

import memfit
from tests import jobs

READY = jobs.conv_job()
NUMBER = 3


def job():
    return jobs.conv_job()


def late():
    import neighbour

    return neighbour.job()


def broken():
    raise RuntimeError("no data here")


def number():
    return 3


def leaving():
    raise SystemExit(1)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A user's file, in a folder of its own that is the working folder, beside another it can import."""
    (tmp_path / "my_training.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("from tests.jobs import contrastive_job as job\n")
    monkeypatch.chdir(tmp_path)
    # What loading a file leaves behind ends with the test.
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("my_training", "neighbour"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield "my_training.py"
    for name in ("my_training", "neighbour"):
        sys.modules.pop(name, None)

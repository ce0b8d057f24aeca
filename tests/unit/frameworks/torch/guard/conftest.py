"""Fixtures of the tests of PyTorch's guard."""

import json

import pytest
import torch.distributed as dist

from memfit.core import env, run_events


class SupervisedRun:
    """The files by which `memfit run` and a script talk, for attempts that begin one after the other."""

    def __init__(self, folder, monkeypatch):
        self._folder = folder
        self._monkeypatch = monkeypatch

    def attempt(self, number, **request):
        """The process is this attempt from here on."""
        path = self._folder / f"attempt-{number}" / "request.json"
        path.parent.mkdir()
        path.write_text(json.dumps(run_events.RunRequest(attempt=number, **request).to_json()))
        self._monkeypatch.setenv(env.RUN_REQUEST, str(path))
        self._events = path.parent

    def events(self):
        """What the script has told in this attempt: names, and values but for time and process."""
        own = ("event", "time", "pid")
        told = run_events.read_events(self._events)
        return [(each["event"], {name: each[name] for name in each if name not in own}) for each in told]


@pytest.fixture
def supervised(tmp_path, monkeypatch):
    return SupervisedRun(tmp_path, monkeypatch)


@pytest.fixture
def one_process():
    """A group of processes with only this one in it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()

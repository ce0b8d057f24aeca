import sys
from types import ModuleType

import pytest

from memfit.core import env
from memfit.core.run_events import RunRequest, read_events
from memfit.frameworks.torch import rescue, supervised


@pytest.fixture
def equipped(monkeypatch, tmp_path):
    """Equips a process that isn't this one; gives what was done and told."""
    done = []
    monkeypatch.setenv(env.RUN_REQUEST, str(tmp_path / "request.json"))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(supervised, "limit_devices", lambda size: done.append(("budget", size)))
    monkeypatch.setattr(rescue, "Rescue", lambda *, eager: done.append(("rescue", eager)))

    def install(request, trainers=()):
        supervised.install(request, dict(trainers))
        return done, [event["event"] for event in read_events(tmp_path)]

    return install


def test_nothing_is_done_that_was_not_asked_for(equipped):
    assert equipped(RunRequest()) == ([], ["torch"])


def test_budget_and_rescue(equipped):
    done, events = equipped(RunRequest(budget_bytes=5, rescue=True, eager=True))

    assert done == [("budget", 5), ("rescue", True)]
    assert events == ["torch", "rescue"]


def test_trainers_are_guarded_when_they_are_imported(equipped, monkeypatch):
    there = ModuleType("imported_before")
    monkeypatch.setitem(sys.modules, "imported_before", there)
    seen = []

    equipped(RunRequest(), {"imported_before": seen.append, "never_imported": seen.append})

    assert seen == [there]

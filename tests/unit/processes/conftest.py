import json
import sys
from pathlib import Path

import pytest

from tests.unit.processes import fake_child


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Children are fake ones; gives what each was asked for, in order."""
    log = tmp_path / "children.log"
    monkeypatch.setattr("memfit.processes.process_tree.DRYRUN", (sys.executable, str(Path(fake_child.__file__))))
    monkeypatch.setenv(fake_child.LOG, str(log))

    def asked():
        return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []

    return asked

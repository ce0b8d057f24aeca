from pathlib import Path

import pytest

from memfit.runs import devices
from memfit.runs.devices import has_devices


@pytest.mark.parametrize(
    ("visible", "files", "found"),
    [(None, ["nvidia0"], True), (None, ["nvidiactl"], False), ("", ["nvidia0"], False), ("0", ["kfd"], True)],
)
def test_devices(monkeypatch, tmp_path, visible, files, found):
    monkeypatch.setattr(devices.env, "visible_cuda_devices", lambda: visible)
    for name in files:
        Path(tmp_path, name).touch()

    assert has_devices(tmp_path) is found

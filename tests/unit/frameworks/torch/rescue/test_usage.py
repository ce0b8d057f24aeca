import sys

import pytest

pytest.importorskip("torch")

from memfit.frameworks.torch.rescue import usage

STATUS = """Name:\tpython
VmPeak:\t  4000 kB
VmHWM:\t    1000 kB
VmRSS:\t     400 kB
VmData:\t    800 kB
"""


@pytest.fixture
def status(tmp_path):
    path = tmp_path / "status"
    path.write_text(STATUS)
    return path


@pytest.mark.parametrize(
    ("limits", "share"),
    [((None, None), 0.5), ((2000 * 1024, None), 0.7), ((None, 4400 * 1024), 4000 / 4400)],
)
def test_the_greatest_share_counts(status, monkeypatch, limits, share):
    monkeypatch.setattr(usage, "limits", lambda: limits)
    assert usage.peak_share(2000 * 1024, status) == pytest.approx(share)


def test_nothing_known_counts_as_full(tmp_path):
    assert usage.peak_share(1, tmp_path / "missing") == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_this_process_has_a_share():
    assert 0 < usage.peak_share(2**50) < 1

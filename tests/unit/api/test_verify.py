import json
from dataclasses import replace

import pytest

import memfit
from memfit.api.devices import calibration_path
from memfit.core.device import Origin
from memfit.core.errors import BadFile, BadInput
from memfit.core.units import MIB
from memfit.core.verification import Measured, Verification

T4 = memfit.find_device("t4")
OF_T4 = Verification(T4, Origin.MEASURED, "2026-11-18", Measured(context_bytes=321 * MIB), ())


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))


def keep(verification, name):
    path = calibration_path(memfit.find_device(name))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(verification.to_json()))


def estimate(device):
    return memfit.estimate(memfit.named_job("torchvision:resnet18"), device=device, batch_size=2)


def test_predictions_on_the_host_are_those_that_are_measured():
    result = memfit.verify("cpu", seconds=2.0)

    assert result.origin is Origin.MEASURED
    assert result.compared
    assert result.worst_error < 0.05
    assert len(result.checks) + result.num_left_out == 12


@pytest.mark.parametrize("seconds", [3.0, pytest.param(600.0, marks=pytest.mark.slow)])
def test_a_rehearsal_measures_nothing_and_agrees(seconds):
    result = memfit.verify("t4", seconds=seconds, rehearse=True)

    assert result.origin is Origin.SIMULATED
    assert result.compared == result.checks
    assert len(result.checks) + result.num_left_out == 12
    assert result.worst_error == 0
    assert all(check.measured_seconds is None for check in result.checks)
    assert all(check.predicted_seconds > 0 for check in result.checks)
    assert result.time_ratio is None
    assert result.measured.bandwidth_bytes_per_second is None


def test_only_the_device_in_hand_can_be_measured():
    for device in ("t4", None):
        with pytest.raises(BadInput, match=r"has no CUDA device .* only a device in hand can be measured.*--rehearse"):
            memfit.verify(device)
    with pytest.raises(BadInput, match="seconds must be a positive number"):
        memfit.verify("cpu", seconds=0)


def test_what_was_measured_is_used_from_then_on():
    before = estimate("t4")
    keep(OF_T4, "t4")

    after = estimate("t4")

    assert after.context_bytes == 321 * MIB
    assert after.peak_bytes - before.peak_bytes == 321 * MIB - before.context_bytes
    assert after.device.context_origin is Origin.MEASURED


def test_a_file_stands_for_its_device_on_another_machine(tmp_path):
    path = tmp_path / "taken along.json"
    OF_T4.save(path)

    assert estimate(str(path)).context_bytes == 321 * MIB
    assert estimate(path).device.name == "t4"


def test_a_calibration_of_another_device_is_refused():
    keep(OF_T4, "a10g")

    with pytest.raises(BadFile, match="is of NVIDIA Tesla T4"):
        estimate("a10g")


def test_a_rehearsal_is_not_used():
    keep(replace(OF_T4, origin=Origin.SIMULATED), "t4")

    with pytest.raises(BadFile, match="rehearsal"):
        estimate("t4")


def test_calibrating_keeps_the_result_whole():
    result = memfit.calibrate("cpu", seconds=0.1)

    kept = memfit.Verification.from_json(calibration_path(result.device).read_text())
    assert kept == result
    assert estimate("cpu").device.source.startswith("measured with memfit calibrate")


def test_calibrating_can_write_a_file(tmp_path):
    memfit.calibrate("cpu", path=tmp_path / "cpu.json", seconds=0.1)

    assert memfit.Verification.from_json((tmp_path / "cpu.json").read_text()).device.name == "cpu"
    with pytest.raises(BadFile, match="can't be written"):
        memfit.calibrate("cpu", path=tmp_path / "missing" / "cpu.json", seconds=0.1)


def test_what_is_no_calibration_is_not_replaced(tmp_path):
    path = tmp_path / "settings.json"
    path.write_text('{"mine": 1}')

    with pytest.raises(BadFile, match="is no calibration: it would be lost"):
        memfit.calibrate("cpu", path=path, seconds=0.1)
    assert path.read_text() == '{"mine": 1}'

    OF_T4.save(path)
    memfit.calibrate("cpu", path=path, seconds=0.1)
    assert memfit.Verification.from_json(path.read_text()).device.name == "cpu"


def test_a_cache_that_is_no_folder_is_told_of_before_anything_is_measured(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("")
    monkeypatch.setattr("memfit.api.verify.verify", lambda *_, **__: pytest.fail("measured"))

    with pytest.raises(BadFile, match="MEMFIT_CACHE"):
        memfit.calibrate("cpu")

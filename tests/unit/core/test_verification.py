import json
from dataclasses import replace

import pytest

from memfit.catalogue import find_device
from memfit.core.device import Origin
from memfit.core.errors import BadFile
from memfit.core.stack import read_stack
from memfit.core.units import MIB
from memfit.core.verification import Measured, ModelCheck, Verification, check_replaceable

MIDDLE = ModelCheck("mlp", "fp32", 8, 102 * MIB, 198 * MIB, 0.01, 100 * MIB, 200 * MIB, 0.02)
MADE = Verification(
    device=replace(find_device("t4"), stack=read_stack("torch2.13-cu130")),
    origin=Origin.MEASURED,
    date="2026-11-18",
    measured=Measured(usable_bytes=15000 * MIB, context_bytes=200 * MIB),
    checks=(MIDDLE, replace(MIDDLE, name="cnn", measured_allocated_bytes=None, failure="out of memory")),
)


def test_errors_are_those_of_predictions():
    assert MIDDLE.allocated_error == pytest.approx(0.02)
    assert MIDDLE.reserved_error == pytest.approx(-0.01)
    assert MIDDLE.time_ratio == pytest.approx(2.0)
    assert MADE.worst_error == pytest.approx(0.02)
    assert MADE.compared == (MIDDLE,)


def test_what_was_not_measured_is_unknown():
    bare = replace(MIDDLE, measured_allocated_bytes=None, measured_reserved_bytes=None, measured_seconds=None)

    nothing = replace(MADE, checks=(bare,))

    assert (bare.allocated_error, bare.reserved_error, bare.time_ratio) == (None, None, None)
    assert (nothing.worst_error, nothing.time_ratio) == (None, None)
    assert "nothing could be compared" in repr(nothing)


def test_a_file_holds_it_all(tmp_path):
    path = tmp_path / "t4.json"
    path.write_text(json.dumps(MADE.to_json()))

    assert Verification.load(path) == MADE


def test_a_calibrated_device_has_what_was_measured():
    device = MADE.calibrated(find_device("t4"))

    assert (device.usable_bytes, device.usable_origin) == (15000 * MIB, Origin.MEASURED)
    assert (device.context_bytes, device.context_origin) == (200 * MIB, Origin.MEASURED)
    assert device.source == "measured with memfit calibrate, PyTorch 2.13, CUDA 13.0"


def test_the_context_of_another_release_is_another():
    device = replace(find_device("t4"), stack=read_stack("torch1.12-cu113"))

    calibrated = MADE.calibrated(device)

    assert calibrated.context_bytes == device.context_bytes
    assert calibrated.usable_bytes == 15000 * MIB


def test_what_was_not_measured_stays():
    device = replace(MADE, measured=Measured()).calibrated(find_device("t4"))

    assert device.context_bytes == find_device("t4").context_bytes


def test_another_device_is_refused():
    with pytest.raises(BadFile, match=r"is of NVIDIA Tesla T4 \(t4\), not of NVIDIA A10G \(a10g\)\. Run `memfit cal"):
        MADE.calibrated(find_device("a10g"))


def test_a_rehearsal_is_no_calibration():
    with pytest.raises(BadFile, match="nothing in it was measured"):
        replace(MADE, origin=Origin.SIMULATED).calibrated(find_device("t4"))


@pytest.mark.parametrize(
    "change",
    [
        {"measured": {"context_bytes": "much"}},
        {"checks": [{"name": "mlp"}]},
        {"format": "memfit.plan"},
        {"device": None},
        {"measured": {"context_bytes": -5}},
        {"measured": {"flops": {"float32": float("inf")}}},
    ],
)
def test_files_that_are_none_are_refused(tmp_path, change):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({**MADE.to_json(), **change}))

    with pytest.raises(BadFile, match=r"calibration\.json"):
        Verification.load(path)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(BadFile, match=r"can't be read: No such file"):
        Verification.load(tmp_path / "missing.json")
    with pytest.raises(BadFile, match=r"can't be read: it is a directory"):
        Verification.load(tmp_path)


@pytest.mark.parametrize(
    "measured",
    [Measured(usable_bytes=0), Measured(usable_bytes=2**62), Measured(context_bytes=2**62)],
    ids=["nothing", "too much", "a context larger than the device"],
)
def test_memory_that_no_such_device_has_is_refused(measured):
    with pytest.raises(BadFile, match="which no such device has"):
        replace(MADE, measured=measured).calibrated(find_device("t4"))


@pytest.mark.parametrize("torch", [[], [2], [-2, 4]])
def test_a_stack_of_no_version_is_refused(torch):
    data = json.loads(json.dumps(MADE.to_json()))
    data["device"]["stack"]["torch"] = torch

    with pytest.raises(BadFile, match=r"device\.stack\.torch"):
        Verification.from_json(data)


def test_a_link_to_a_calibration_is_as_good_as_it(tmp_path):
    (tmp_path / "t4.json").write_text(json.dumps(MADE.to_json()))
    (tmp_path / "mine.json").symlink_to(tmp_path / "t4.json")
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")

    assert Verification.load(tmp_path / "mine.json") == MADE
    for name in ("loop.json", "no\0name.json"):
        with pytest.raises(BadFile, match="can't be read"):
            Verification.load(tmp_path / name)


def test_only_a_calibration_gives_way_to_another(tmp_path):
    path = tmp_path / "t4.json"
    for content in ("", json.dumps(MADE.to_json())):
        path.write_text(content)
        check_replaceable(path)
    path.write_text("{}")

    with pytest.raises(BadFile, match="would be lost"):
        check_replaceable(path)
    check_replaceable(tmp_path / "missing.json")

import json

import memfit
from memfit.commands import main


def test_all_devices_are_listed(capsys):
    code = main(["devices"])

    written = capsys.readouterr().out
    assert code == 0
    assert all(device.name in written for device in memfit.list_devices())


def test_one_device_is_listed(capsys):
    code = main(["devices", "RTX 3090", "--json"])

    (device,) = json.loads(capsys.readouterr().out)
    expected = memfit.find_device("rtx-3090")
    assert code == 0
    assert (device["name"], device["usable_bytes"]) == ("rtx-3090", expected.usable_bytes)
    assert (device["kind"], device["capability"], device["context_origin"]) == ("cuda", [8, 6], expected.context_origin)


def test_an_unknown_device_names_the_nearest(capsys):
    assert main(["devices", "rtx 390"]) == 2
    assert "memfit: no device is called 'rtx 390'. The nearest: rtx-3090." in capsys.readouterr().err


def test_a_context_says_whether_it_was_measured(capsys):
    main(["devices", "t4"])
    main(["devices", "v100"])

    written = capsys.readouterr().out
    assert "134.9 MiB (measured)" in written
    assert "MiB (assumed)" in written


def test_the_context_on_another_stack(capsys):
    assert main(["devices", "rtx-3090", "--stack", "torch1.12-cu113"]) == 0
    written = capsys.readouterr().out
    assert "1.28 GiB (assumed)" in " ".join(written.split())
    assert "software: PyTorch 1.12, CUDA 11.3 (as asked)" in written

    assert main(["devices", "--stack", "torch1.12-cu113"]) == 2
    assert "--stack is for one device" in capsys.readouterr().err

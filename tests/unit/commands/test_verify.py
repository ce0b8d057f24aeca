import json

from memfit.commands import main


def test_a_rehearsal_is_shown(capsys):
    assert main(["verify", "-d", "t4", "--rehearse", "--seconds", "0.1"]) == 0

    written = capsys.readouterr().out
    assert "a rehearsal on the simulated device; nothing was measured" in written
    assert "perceptron" in written


def test_json_is_the_whole_result(capsys):
    assert main(["verify", "-d", "cpu", "--seconds", "0.1", "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["format"] == "memfit.verification"


def test_a_gpu_that_is_not_there_is_refused(capsys):
    assert main(["verify", "-d", "t4"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_one_device_at_a_time(capsys):
    assert main(["verify", "-d", "t4,a10g"]) == 2
    assert "is for one device" in capsys.readouterr().err

import json
import sys

import pytest

import memfit
from memfit import commands
from memfit.commands.parser import aliases_of, suggestion


def parsed(*arguments):
    return commands._parse(list(arguments))


@pytest.mark.parametrize(
    ("given", "attribute", "value"),
    [
        (["--seq-len", "128"], "sequence_length", 128),
        (["--seq_len", "128"], "sequence_length", 128),
        (["--sequence_length=128"], "sequence_length", 128),
        (["--seq", "128"], "sequence_length", 128),
        (["--sequ", "128"], "sequence_length", 128),
        (["--max-length", "128"], "sequence_length", 128),
        (["--bs", "4"], "batch_size", 4),
        (["--batch", "4"], "batch_size", 4),
        (["--batch_size", "4"], "batch_size", 4),
        (["--per_device_train_batch_size", "4"], "batch_size", 4),
        (["--gpu", "t4"], "device", "t4"),
        (["--dev", "t4"], "device", "t4"),
        (["--imgsz", "640"], "image_size", 640),
        (["--num-workers", "2"], "workers", 2),
        (["--optim", "SGD_momentum"], "optimizer", "sgd-momentum"),
        (["--mixed_precision", "16-mixed"], "precision", "amp-fp16"),
        (["-p", "bf16-mixed"], "precision", "amp-bf16"),
        (["-p", "32-true"], "precision", "fp32"),
        (["-p", "mixed_bfloat16"], "precision", "amp-bf16"),
        (["-p", "torch.bfloat16"], "precision", "bf16"),
        (["-p", "fp16"], "precision", "fp16"),
    ],
)
def test_what_people_type_is_understood(given, attribute, value):
    assert getattr(parsed("estimate", "x.py:job", *given), attribute) == value


def test_names_of_precisions_are_understood_in_python_too():
    assert memfit.Job(None, precision="bf16-mixed").precision == "amp-bf16"
    with pytest.raises(memfit.BadInput, match="but 'fp7' was given"):
        memfit.Job(None, precision="fp7")


def test_arguments_of_a_script_are_its_own():
    arguments = parsed("dryrun", "--gpu", "t4", "train.py", "--seq_len", "5", "--json").arguments

    assert arguments == ["--seq_len", "5", "--json"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["estimat"], "there is no 'estimat'. Did you mean 'estimate'?"),
        (["dry-run", "train.py"], "Did you mean 'dryrun'?"),
        (["max_batch", "x"], "Did you mean 'max-batch'?"),
        (["train.py"], "To run a script: memfit dryrun train.py, or memfit run train.py"),
        (["timm:resnet50"], "To estimate a model: memfit estimate timm:resnet50"),
        (["data", "inspct"], "Did you mean 'inspect'?"),
        (["estimate", "x", "--optimizer", "adamm"], "Did you mean 'adam'?"),
        (["estimate", "x", "--presicion", "fp16"], "Did you mean '--precision'?"),
        (["estimate", "x", "--batchsize", "8"], "Did you mean '--batch-size'?"),
        (["estimate", "x", "--sequence_lenght", "8"], "Did you mean '--sequence-length'?"),
        (["data", "bench", "x", "--secnds", "3"], "Did you mean '--seconds'?"),
        (["dryrun", "--devise", "t4", "train.py"], "Did you mean '--device'?"),
        (["plan", "x", "-d", "t4,,a10g"], "a name is missing in 't4,,a10g'"),
    ],
)
def test_what_was_meant_is_suggested(given, said, capsys):
    with pytest.raises(SystemExit) as left:
        commands.main(given)

    written = capsys.readouterr()
    assert left.value.code == 2
    assert written.out == ""
    assert said in written.err


def test_nothing_is_suggested_where_nothing_is_near():
    assert suggestion("quux", ["estimate", "plan"]) == ""


def test_help_may_be_asked_for_as_a_command(capsys):
    with pytest.raises(SystemExit) as left:
        commands.main(["help", "estimate"])

    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("usage: memfit estimate")


@pytest.mark.parametrize("given", [[], ["data"]])
def test_without_a_command_there_is_help(given, capsys):
    assert commands.main(given) == 0

    written = capsys.readouterr()
    assert written.err == ""
    assert written.out.startswith("usage: memfit")
    assert "positional arguments:" in written.out


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (["--json"], "UsageError"),
        (["estimat", "--json"], "UsageError"),
        (["estimate", "--json"], "UsageError"),
        (["estimate", "x", "--json", "-b", "many"], "UsageError"),
        (["estimate", "missing.py:job", "--json"], "BadTarget"),
        (["compare", "missing.py:job", "-d", "t4", "--json"], "BadTarget"),
        (["max-batch", "missing.py:job", "--json"], "BadTarget"),
        (["max-batch", "x.py:job", "--json", "--candidates", "a"], "BadInput"),
        (["plan", "missing.py:job", "--json"], "BadTarget"),
        (["plan", "--json"], "BadInput"),
        (["dryrun", "--json", "-d", "t4", "missing.py"], "BadTarget"),
        (["dryrun", "--json", "-d", "t4,a10g", "train.py"], "BadInput"),
        (["run", "--json", "missing.py"], "BadTarget"),
        (["data", "inspect", "missing.npy", "--json"], "BadFile"),
        (["data", "convert", "missing.npy", "x.npy", "--json"], "BadFile"),
        (["data", "bench", "missing.npy", "--json"], "BadFile"),
        (["devices", "xyz", "--json"], "UnknownDevice"),
    ],
)
def test_errors_are_one_json_document(given, kind, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        code = commands.main(given)
    except SystemExit as left:
        code = left.code

    written = capsys.readouterr()
    found = json.loads(written.out)
    assert (code, set(found)) == (2, {"error"})
    assert found["error"]["exit_code"] == 2
    assert found["error"]["type"] == kind or kind == "BadFile"
    assert found["error"]["message"] in written.err


def test_interruptions_and_faults_are_json_too(monkeypatch, capsys):
    def fail(error):
        def run(arguments):
            raise error

        return run

    monkeypatch.setattr("memfit.commands.devices.run", fail(KeyboardInterrupt()))
    assert commands.main(["devices", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["error"] == {
        "type": "KeyboardInterrupt",
        "message": "interrupted",
        "exit_code": 130,
    }

    # What follows the script is the script's own.
    monkeypatch.setattr("memfit.commands.run.run", fail(KeyboardInterrupt()))
    assert commands.main(["run", "train.py", "--json"]) == 130
    assert capsys.readouterr().out == ""

    monkeypatch.setattr("memfit.commands.devices.run", fail(ZeroDivisionError("x")))
    with pytest.raises(ZeroDivisionError):
        commands.main(["devices", "--json"])
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 1


@pytest.mark.parametrize(
    "given",
    [
        ["{}"],
        ["devices", "{}"],
        ["devices", "--{}"],
        ["estimate", "{}.py:job", "-d", "t4"],
        ["estimate", "timm:{}", "-d", "t4"],
        ["compare", "x{}:y", "-d", "t4"],
        ["plan", "-d", "t4", "--script", "{}.py"],
        ["dryrun", "-d", "t4", "{}.py"],
        ["run", "{}.py"],
        ["run", "--budget", "{}", "x.py"],
        ["data", "inspect", "{}.npy"],
    ],
)
def test_hostile_arguments_do_not_steer_the_terminal(given, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hostile = "\x1b]0;owned\x07\x9b2J\u202ex"
    try:
        code = commands.main([word.format(hostile) for word in given])
    except SystemExit as left:
        code = left.code

    written = capsys.readouterr()
    assert code == 2
    assert (written.out + written.err).replace("\n", "").isprintable()
    assert "owned" in written.err


def test_the_text_of_an_exception_does_not_steer_the_terminal_either(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "hostile_job.py").write_text("def job():\n    raise ValueError('a' + chr(27) + '[31m' + chr(0x202e))\n")
    code = commands.main(["estimate", "hostile_job.py:job", "-d", "t4"])
    sys.modules.pop("hostile_job", None)

    assert code == 2
    assert r"ValueError: a\x1b[31m\u202e (hostile_job.py:2)" in capsys.readouterr().err


def test_aliases_are_known_to_the_documentation():
    parser = commands._parse(["estimate", "x"]).parser
    action = next(a for a in parser._actions if a.dest == "sequence_length")

    assert aliases_of(parser, action)[:2] == ["--seq", "--seq-len"]

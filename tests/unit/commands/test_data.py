import json

import numpy as np
import pytest

from memfit import commands
from memfit.commands import output


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.random.default_rng(0).standard_normal((400, 5)))
    np.savez("both.npz", images=np.zeros((50, 2), "f4"), other=np.ones((50, 3)), labels=np.arange(50))
    return tmp_path


def run(*arguments):
    return commands.main(["data", *arguments])


def test_inspect(folder, capsys):
    assert run("inspect", "x.npy") == 0
    assert "x.npy: 400 samples, 15.6 KiB when loaded" in capsys.readouterr().out


def test_inspect_chooses_fields(folder, capsys):
    assert run("inspect", "both.npz", "--columns", "images, other", "--labels", "labels", "--json") == 0

    names = [(field["name"], field["is_label"]) for field in json.loads(capsys.readouterr().out)["fields"]]
    assert names == [("images", False), ("other", False), ("labels", True)]


def test_convert(folder, capsys):
    assert run("convert", "x.npy", "small.npy", "--dtype", "float32") == 0

    assert "small.npy: 400 samples" in capsys.readouterr().out
    assert np.load("small.npy").dtype == "float32"


def test_convert_as_json_and_quietly(folder, capsys):
    assert run("convert", "x.npy", "a.npy", "--dtype", "float16", "--json") == 0
    assert json.loads(capsys.readouterr().out)["num_samples"] == 400
    assert run("convert", "x.npy", "a.npy", "--quiet", "--overwrite", "--chunk", "1KiB") == 0
    assert capsys.readouterr() == ("", "")


def test_bench(folder, capsys):
    assert run("bench", "x.npy", "--seconds", "0.01", "--batch-size", "16") == 0
    assert "of a plain read (measured)" in capsys.readouterr().out
    assert run("bench", "x.npy", "--seconds", "0.01", "--json") == 0
    assert json.loads(capsys.readouterr().out)["num_samples"] == 400


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "nothing.npy"], "there is no 'nothing.npy'"),
        (["inspect", "x.npy", "--memory", "much"], "is not a size"),
        (["inspect", "both.npz", "--columns", "images,,labels"], "has an empty name in it"),
        (["inspect", "both.npz", "--columns", "pixels"], "pixels"),
        (["convert", "x.npy", "x.npy"], "both source and destination"),
        (["convert", "x.npy", "small.npy", "--dtype", "int8"], "cut off all digits after the decimal point"),
        (["convert", "x.npy", "small.npy", "--compress", "gzip"], "is not for npy files"),
        (["bench", "x.npy", "--seconds", "-1"], "seconds must be positive"),
    ],
)
def test_bad_input_is_one_line_and_2(folder, capsys, arguments, message):
    assert run(*arguments) == 2

    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith("memfit: ")
    assert message in written.err
    assert "Traceback" not in written.err


def test_without_an_action_the_help_is_shown(folder, capsys):
    assert run() == 0
    assert "ACTION" in capsys.readouterr().out


def test_an_overflow_is_refused_unless_allowed(folder, capsys):
    np.save("large.npy", np.array([1.0, 1e300]))

    assert run("convert", "large.npy", "small.npy", "--dtype", "float32") == 2
    assert "sample 1 holds 1e+300" in capsys.readouterr().err
    assert run("convert", "large.npy", "small.npy", "--dtype", "float32", "--allow-overflow") == 0
    assert "1 of 2 values became infinite" in capsys.readouterr().out


class Terminal:
    def __init__(self):
        self.written = []

    def isatty(self):
        return True

    def write(self, text):
        self.written.append(text)
        return len(text)

    def flush(self):
        pass


def test_a_bar_appears_when_it_takes_a_while(folder, monkeypatch):
    monkeypatch.setattr(output, "QUICK_SECONDS", 0.0)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)

    assert run("convert", "x.npy", "small.npy", "--chunk", "1KiB") == 0

    assert "converting" in "".join(terminal.written)


@pytest.mark.parametrize("options", [[], ["--quiet"]])
def test_what_is_quick_or_quiet_has_no_bar(folder, monkeypatch, options):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)

    assert run("convert", "x.npy", "small.npy", *options) == 0

    assert terminal.written == []


def test_inspect_tells_of_columns_of_text(folder, capsys):
    (folder / "t.csv").write_text("a,kind\n1,dog\n2,cat\n")

    assert run("inspect", "t.csv", "--json") == 0

    (warning, *_) = json.loads(capsys.readouterr().out)["warnings"]
    assert "'kind' of" in warning
    assert (
        "Leave out with --columns (columns=, the names of those to use), or use as labels with --labels (labels=)."
        in warning
    )


def test_messages_name_options(folder, capsys):
    (folder / "labels=1.csv").write_text("a,kind\n1,dog\n2,cat\n")

    assert run("convert", "labels=1.csv", "y.npy") == 2

    error = " ".join(capsys.readouterr().err.split())
    assert "labels=1.csv" in error
    assert "Leave out with --columns (columns=, the names" in error
    assert "with --labels (labels=)." in error


@pytest.mark.parametrize("size", ["8x", "x8", "8x9x10", "-5", "1e3"])
def test_a_size_that_is_half_written_is_refused(folder, capsys, size):
    assert run("convert", "pictures", "x.npy", "--image-size", size) == 2

    assert "is no size of images. Give one number for squares, such as 224, or height" in capsys.readouterr().err

import json
import os
import shlex
import subprocess
import sys

import pytest
from rich.text import Text

from memfit.commands import output
from memfit.core.errors import BadFile
from memfit.reports.dryrun.figures import report
from memfit.reports.terminal import render_devices
from tests.unit.reports.builders import RTX_3090, make_estimate
from tests.unit.reports.run_builders import make_dead_run


def test_json_is_one_document(capsys):
    output.print_json({"a": [1, None]})

    assert capsys.readouterr().out == '{"a": [1, null]}\n'


def test_a_run_is_written_to_standard_output(capsys):
    output.print_report(report(make_dead_run()))

    written = capsys.readouterr()
    assert "train.py would run out of memory on" in written.out
    assert written.err == ""


def test_a_folder_may_be_missing_but_not_a_file(tmp_path):
    (tmp_path / "file").touch()
    output.check_folder(str(tmp_path))
    output.check_folder(str(tmp_path / "new"))

    with pytest.raises(BadFile, match=r"file' is not a folder. Give the path of one; it is made where it is missing."):
        output.check_folder(str(tmp_path / "file"))


def test_a_file_is_written_without_colour_and_without_breaking_rows(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    output.show(render_devices([RTX_3090]))

    lines = capsys.readouterr().out.splitlines()
    assert "\x1b" not in "".join(lines)
    assert any("rtx-3090" in line and "23.7 GiB (measured)" in line and "300.0 MiB (assumed)" in line for line in lines)


def test_the_columns_asked_for_are_used(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    output.show(render_devices([RTX_3090, RTX_3090]))

    assert 60 < max(len(line.rstrip()) for line in capsys.readouterr().out.splitlines()) <= 90


def test_progress_is_for_terminals(capsys):
    with output.progress("tracing", quiet=False):
        pass

    assert capsys.readouterr().err == ""


def test_progress_goes_to_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with output.progress("tracing", quiet=True):
        pass
    assert capsys.readouterr().err == ""

    with output.progress("tracing", quiet=False):
        pass
    assert capsys.readouterr().out == ""


def test_a_path_is_checked_before_any_work(tmp_path):
    output.check_writable(str(tmp_path / "memory.html"))

    with pytest.raises(
        BadFile, match=r"there is no folder '.*missing' to write '.*' to\. Make it first, or name another"
    ):
        output.check_writable(str(tmp_path / "missing" / "memory.html"))
    with pytest.raises(BadFile, match=r"is a folder\. Give the path of a file, such as memory\.html"):
        output.check_writable(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_read_only_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)

    with pytest.raises(BadFile, match=r"can't be written to, so '.*' can't be either\. Name another"):
        output.check_writable(str(tmp_path / "memory.html"))


def test_a_bare_name_is_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    output.check_writable("memory.html")


def test_json_of_an_estimate_has_no_surprises(capsys):
    output.print_json(make_estimate().to_json())

    assert json.loads(capsys.readouterr().out)["device"]["name"] == "rtx-3090"


def test_what_a_report_forgets_to_escape_cannot_steer_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    output.show(Text("a\x1b]0;owned\x9bb\u202e", style="bold"))

    # The colours are ours; the name's own escapes are shown.
    assert "a\\x1b]0;owned\\x9bb\\u202e" in capsys.readouterr().out


def _through_shell(redirection, command):
    line = f"{shlex.quote(sys.executable)} -m memfit {command} {redirection}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(redirection):
    done = _through_shell(redirection, "devices t4")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_standard_output_takes_no_place_of_a_file(tmp_path):
    (tmp_path / "page.py").write_text("print('printed')\n")
    done = _through_shell(">&-", f"run --html {tmp_path}/page.html {tmp_path}/page.py")
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert (tmp_path / "page.html").read_text().lower().startswith("<!doctype html")


@pytest.mark.parametrize("command", ["devices t4", "devices --json", "estimate nope:x --json"])
def test_standard_output_on_a_full_disk(command):
    done = _through_shell("> /dev/full", command)
    assert done.returncode == 2
    assert "the answer can't be written to standard output: No space left on device." in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_for_a_reader_that_went_away():
    done = _through_shell("| true", "data inspect nope.npy --json")
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_what_is_no_report_is_not_replaced(tmp_path):
    for name, content in (("old.html", "<!doctype html>"), ("plan.json", '{"a": 1}'), ("empty.html", "")):
        (tmp_path / name).write_text(content)
        output.check_writable(str(tmp_path / name))
    (tmp_path / "train.py").write_text("import torch\n")
    with pytest.raises(BadFile, match=r"is there already and is no report"):
        output.check_writable(str(tmp_path / "train.py"))

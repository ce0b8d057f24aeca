import io
import threading

import pytest

from memfit.core import progress
from memfit.core.progress import announce, doing


class Terminal(io.StringIO):
    """Somebody looks at it."""

    def isatty(self):
        return True


def shown_within(stream, text):
    """Waits until a text is there."""
    for _ in range(1000):
        if text in stream.getvalue():
            return True
        threading.Event().wait(0.01)
    return False


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(progress, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_REFRESH_SECONDS", 0.01)


def terminal_of(monkeypatch):
    """Standard error as a terminal; by the test itself, because pytest sets it anew between fixtures and test."""
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    return stream


def test_what_is_done_is_said_and_gone_afterwards(monkeypatch, at_once, capsys):
    terminal = terminal_of(monkeypatch)
    with doing("planning"):
        assert shown_within(terminal, "memfit: planning (0:0")
        with doing("tracing resnet50"):
            assert shown_within(terminal, "memfit: tracing resnet50 (0:0")
        terminal.truncate(0)
        assert shown_within(terminal, "memfit: planning (0:0")

    # THEN the last that was written is blank
    assert terminal.getvalue().rsplit("\r", 2)[1].strip() == ""
    assert capsys.readouterr().out == ""
    assert not any(thread.name == "memfit-progress" for thread in threading.enumerate())


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_the_line_fits_the_terminal(monkeypatch, at_once, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = terminal_of(monkeypatch)
    with doing("tracing " + "a long name " * 20):
        assert shown_within(terminal, "... (0:0")

    assert max(map(len, terminal.getvalue().split("\r"))) < columns


def test_what_is_quick_leaves_no_trace(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    with doing("planning"):
        pass

    assert stream.getvalue() == ""


@pytest.mark.parametrize("case", ["pipe", "off", "quiet", "none"])
def test_where_nobody_looks_nothing_is_said(monkeypatch, at_once, case):
    stream = io.StringIO() if case == "pipe" else Terminal()
    monkeypatch.setattr("sys.stderr", None if case == "none" else stream)
    if case == "off":
        monkeypatch.setenv("MEMFIT_PROGRESS", "0")
    with doing("planning", quiet=case == "quiet"), doing("tracing"):
        assert not any(thread.name == "memfit-progress" for thread in threading.enumerate())

    assert stream.getvalue() == ""


def test_a_notebook_shows_it(monkeypatch, at_once):
    class OutStream(io.StringIO):
        """Of a notebook, which is no terminal."""

    OutStream.__module__ = "ipykernel.iostream"
    stream = OutStream()
    monkeypatch.setattr("sys.stderr", stream)
    with doing("planning"):
        assert shown_within(stream, "memfit: planning")


def test_an_error_ends_it(monkeypatch, at_once):
    terminal = terminal_of(monkeypatch)
    with pytest.raises(ValueError, match="no"), doing("planning"), doing("tracing"):
        raise ValueError("no")

    assert not any(thread.name == "memfit-progress" for thread in threading.enumerate())
    with doing("again"):
        assert shown_within(terminal, "memfit: again")


def test_a_terminal_that_goes_away_is_no_error(monkeypatch, at_once):
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    with doing("planning"):
        shown_within(stream, "planning")
        stream.close()


def test_an_announcement_stays(monkeypatch, at_once):
    terminal = terminal_of(monkeypatch)
    with doing("planning"):
        assert shown_within(terminal, "memfit: planning (0:0")
        announce("running the script once more")

    assert "\rmemfit: running the script once more\n" in terminal.getvalue()


def test_other_threads_do_not_mix(monkeypatch, at_once):
    terminal = terminal_of(monkeypatch)

    def other():
        with doing("something else"):
            assert shown_within(terminal, "memfit: planning")

    with doing("planning"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    assert "something else" not in terminal.getvalue()


def test_a_message_goes_to_standard_error_with_its_lines(capsys):
    announce("first\n  second\x1b[31m", by="memfit rescue")

    assert capsys.readouterr() == ("", "memfit rescue: first\n  second\\x1b[31m\n")

import pytest

from memfit.core.printing import printable, printable_traceback, text_of
from memfit.core.units import parse_size

HOSTILE = ["\x1b[2J", "\x07", "\r", "\x9b31m", "\x7f", "\u202e", "\u2066", "\u200b", "\udcff", "\u2028"]


@pytest.mark.parametrize("sign", HOSTILE)
def test_nothing_that_steers_a_terminal_is_left(sign):
    shown = printable(f"a{sign}b\nc", keep="\n")

    assert shown.replace("\n", "").isprintable()
    assert (shown[0], shown[-3:]) == ("a", "b\nc")


def test_names_of_any_language_stay():
    assert printable("модель 模型 modèle \U0001f600") == "модель 模型 modèle \U0001f600"


def test_a_traceback_has_none_of_our_frames():
    # GIVEN an error of memfit's that led to one of the caller's
    try:
        try:
            parse_size("much")
        except ValueError as error:
            raise KeyError("a\x1b[1m") from error
    except KeyError as error:
        text = printable_traceback(error)

    assert text.count("Traceback (most recent call last):") == 2
    assert "direct cause" in text and "parse_size(" in text
    assert [line for line in text.splitlines() if "File " in line and "test_printing" not in line] == []
    assert "\x1b" not in text


class Silent(Exception):
    def __str__(self):
        raise ValueError("no text while shapes are traced")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("two\n  lines"), "two lines"),
        (ValueError(" "), "no message"),
        (Silent(), "no message"),
    ],
)
def test_an_error_in_one_line(error, text):
    assert text_of(error) == text

import pytest

from memfit.core.printing import printable

HOSTILE = ["\x1b[2J", "\x07", "\r", "\x9b31m", "\x7f", "\u202e", "\u2066", "\u200b", "\udcff", "\u2028"]


@pytest.mark.parametrize("sign", HOSTILE)
def test_nothing_that_steers_a_terminal_is_left(sign):
    shown = printable(f"a{sign}b\nc", keep="\n")

    assert shown.replace("\n", "").isprintable()
    assert (shown[0], shown[-3:]) == ("a", "b\nc")


def test_names_of_any_language_stay():
    assert printable("модель 模型 modèle \U0001f600") == "модель 模型 modèle \U0001f600"

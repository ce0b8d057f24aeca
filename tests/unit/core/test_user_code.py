import json
import os
import sys
import sysconfig

import pytest

from memfit.core import user_code


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (os.path.join("scripts", "train.py"), True),
        (os.path.abspath("train.py"), True),
        (user_code.__file__, False),
        (json.__file__, False),
        (os.path.join(sysconfig.get_path("purelib"), "library", "model.py"), False),
        ("<frozen importlib._bootstrap>", False),
        ("<string>", False),
    ],
)
def test_a_file_is_the_users_unless_it_is_installed_or_ours(path, expected):
    assert user_code.is_users(path) is expected


def test_an_error_is_told_by_the_innermost_line_of_the_users():
    with pytest.raises(json.JSONDecodeError) as raised:
        json.loads("{")

    place, code = user_code.user_line(raised.value)

    assert place.endswith(" in test_an_error_is_told_by_the_innermost_line_of_the_users")
    assert "test_user_code.py:" in place
    assert code == 'json.loads("{")'


def test_the_import_that_was_under_way(tmp_path, monkeypatch):
    # GIVEN an installed package whose import needs too much, and a module of the script's own
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "greedy_library.py").write_text("raise MemoryError")
    (tmp_path / "own_part.py").write_text("import greedy_library")
    monkeypatch.setattr(user_code, "INSTALLED_FOLDERS", (str(tmp_path / "greedy"),))

    with pytest.raises(MemoryError) as raised:
        __import__("own_part")

    assert user_code.interrupted_import(raised.value) == "greedy_library"
    sys.modules.pop("own_part", None)


def test_an_extension_that_can_not_be_loaded_has_a_name():
    assert user_code.interrupted_import(ImportError("failed to map segment", name="torch._C")) == "torch._C"


def test_a_failure_in_a_function_of_a_library_is_no_import():
    with pytest.raises(json.JSONDecodeError) as raised:
        json.loads("{")

    assert user_code.interrupted_import(raised.value) == ""


def test_short_names_of_files(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), str(tmp_path / "site" / "deeper"), ""])
    monkeypatch.chdir(tmp_path)
    names = user_code.SourceNames()

    assert names.short(str(tmp_path / "site" / "package" / "model.py")) == os.path.join("package", "model.py")
    assert names.short(str(tmp_path / "site" / "deeper" / "model.py")) == "model.py"
    assert names.short(str(tmp_path / "train.py")) == "train.py"
    assert names.short(os.path.join(os.sep, "elsewhere", "train.py")) == "train.py"


def test_the_innermost_line_of_the_users_on_a_stack_is_none_where_it_is_the_caller():
    names = user_code.SourceNames()
    library, own, caller = (json.__file__, 3), (os.path.abspath("net.py"), 31), (os.path.abspath("train.py"), 5)

    assert names.innermost([library, own, caller]) == "net.py:31"
    assert names.innermost([library, own, caller], {caller}) == "net.py:31"
    assert names.innermost([library, caller], {caller}) == ""
    assert names.innermost([library]) == ""


def test_lines_that_are_being_called():
    (line,) = {line for path, line in user_code.caller_lines() if path == __file__}

    assert line == test_lines_that_are_being_called.__code__.co_firstlineno + 1

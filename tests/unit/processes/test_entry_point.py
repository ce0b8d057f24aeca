import os
import sys

import pytest

from memfit.core.errors import BadInput, BadTarget
from memfit.core.units import GIB, MIB
from memfit.processes import entry_point as target
from memfit.processes.entry_point import check_module, check_script, find_target


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "mistake.py").write_text("def (:\n")
    (tmp_path / "train").write_text("#!/usr/bin/env python\nprint(1)\n")
    (tmp_path / "train.sh").write_text("set -e; python train.py\n")
    (tmp_path / "weights.bin").write_bytes(b"\x80\x02\xff\x00")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
    (tmp_path / "package" / "inner").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("raise RuntimeError('nobody asked for me')\n")
    (tmp_path / "package" / "train.py").write_text("")
    (tmp_path / "package" / "inner" / "__init__.py").write_text("")
    (tmp_path / "package" / "inner" / "__main__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["train.py", "./train.py", "train", "mistake.py", "latin.py"])
def test_scripts_pass(folder, name):
    check_script(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.py", "there is no file 'gone.py' in {folder!r}. Give the path of a Python script."),
        ("package", "'package' is a folder. Give the path of a Python script, or -m with the name of a module."),
        ("train.sh", "'train.sh' is not a Python script. Give the file that `python` itself would be given."),
        ("weights.bin", "'weights.bin' is not a Python script. Give the file that `python` itself would be given."),
    ],
)
def test_other_paths_are_refused(folder, name, message):
    with pytest.raises(BadTarget) as refused:
        check_script(name)

    assert str(refused.value) == message.format(folder=str(folder))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_script_that_cannot_be_read_is_refused(folder):
    (folder / "train.py").chmod(0)

    with pytest.raises(BadTarget, match=r"'train.py' can't be read: Permission denied. Give a file that can."):
        check_script("train.py")


@pytest.mark.parametrize("name", ["train", "package.train", "package.inner", "timeit", "pytest"])
def test_modules_pass_and_are_not_imported(folder, name):
    check_module(name)

    assert "package" not in sys.modules


@pytest.mark.parametrize("name", ["gone", "package.gone", "package.train.gone", "train.gone", "", ".train", "a..b"])
def test_other_names_are_refused(folder, name):
    with pytest.raises(BadTarget) as refused:
        check_module(name)

    assert str(refused.value) == (
        f"there is no module {name!r} in {str(folder)!r} or among the installed ones. "
        "Give -m a name that `python -m` knows, or the path of a script without -m."
    )


def test_a_package_needs_something_to_run(folder):
    with pytest.raises(BadTarget, match=r"'package' is a package without a __main__ module. Name the module in it"):
        check_module("package")


def test_a_loaded_module_without_a_spec_is_no_problem(folder, monkeypatch):
    import types

    monkeypatch.setitem(sys.modules, "made_up", types.ModuleType("made_up"))
    with pytest.raises(BadTarget, match="there is no module 'made_up'"):
        check_module("made_up")


def test_a_budget_that_python_itself_exceeds(monkeypatch):
    monkeypatch.setattr(target, "has_devices", lambda: False)

    with pytest.raises(BadInput, match=r"a budget of 1.00 KiB is less than \d+\.\d MiB, what Python itself takes"):
        target.check_budget(1024)
    target.check_budget(200 * MIB)
    target.check_budget(100 * GIB)


def test_a_budget_of_a_device_below_one_segment(monkeypatch):
    monkeypatch.setattr(target, "has_devices", lambda: True)

    with pytest.raises(BadInput, match=r"less than 2.00 MiB, the smallest piece of device memory"):
        target.check_budget(1024)
    target.check_budget(3 * MIB)


def test_where_it_can_not_be_measured_no_budget_is_refused(monkeypatch):
    monkeypatch.setattr(target, "has_devices", lambda: False)
    monkeypatch.setattr(target.sys, "executable", "/no/such/python")

    target.check_budget(1024)


def test_a_bare_name_may_be_that_of_an_installed_program(folder, monkeypatch):
    # GIVEN a program of Python that pip has put on the path
    programs = folder / "bin"
    programs.mkdir()
    (programs / "launch").write_text("#!/usr/bin/env python\nprint(1)\n")
    (programs / "launch").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))

    assert find_target("launch", module=False) == str(programs / "launch")
    # A file of that name that is here comes first, and a path is nothing else.
    assert find_target("train", module=False) == "train"
    with pytest.raises(BadTarget, match=r"there is no file '\./launch'"):
        find_target("./launch", module=False)
    assert find_target("package.train", module=True) == "package.train"


@pytest.mark.parametrize("module", [True, False])
def test_a_target_that_is_not_there(folder, module):
    with pytest.raises(BadTarget, match="there is no"):
        find_target("made_up", module=module)

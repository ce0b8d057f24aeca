import builtins
import importlib
import importlib.machinery
import importlib.util
import sys

import pytest

from memfit.frameworks.torch.shapes.imports import on_import, watch_imports


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that nobody has imported yet."""
    folder = tmp_path / "invented_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("VALUE = 1\n")
    (folder / "inner.py").write_text("VALUE = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder.name
    for name in [name for name in sys.modules if name.startswith(folder.name)]:
        del sys.modules[name]


def test_an_action_before_the_import(package):
    heard = []
    with on_import({package: lambda: heard.append(package in sys.modules)}, {}):
        assert heard == []
        importlib.import_module(package)
        importlib.import_module(package)

    assert heard == [False]


def test_an_action_that_imports_the_module_itself(package, tmp_path):
    # GIVEN code that must not run twice, such as the registration of operators
    (tmp_path / package / "__init__.py").write_text(
        "import builtins\nbuiltins.runs = getattr(builtins, 'runs', 0) + 1\n"
    )
    made = []
    try:
        with on_import({package: lambda: made.append(importlib.import_module(package))}, {}):
            module = importlib.import_module(package)
        runs = builtins.runs
    finally:
        vars(builtins).pop("runs", None)

    assert runs == 1
    assert made == [module]
    assert module.__spec__.origin == module.__file__
    assert isinstance(module.__spec__.loader, importlib.machinery.SourceFileLoader)


def test_an_action_after_the_import(package):
    values = []
    with on_import({}, {f"{package}.inner": lambda module: values.append(module.VALUE)}):
        importlib.import_module(package)
        assert values == []
        inner = importlib.import_module(f"{package}.inner")

    assert values == [2]
    assert inner.__file__.endswith("inner.py")
    assert inner.__spec__.name == f"{package}.inner"


def test_a_module_that_was_imported_before(package):
    module = importlib.import_module(package)
    heard = []
    with on_import({package: lambda: heard.append("before")}, {package: heard.append}):
        importlib.import_module(package)

    assert heard == [module]


def test_a_module_that_is_not_there(package):
    with on_import({}, {"no_such_module": pytest.fail}), pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module")


def test_afterwards_nothing_is_heard(package):
    finders = list(sys.meta_path)
    with pytest.raises(KeyError), on_import({package: pytest.fail}, {package: pytest.fail}):
        raise KeyError

    assert sys.meta_path == finders
    importlib.import_module(package)


def test_asking_whether_a_module_is_there_is_no_import(package):
    heard = []
    with on_import({}, {package: heard.append}):
        assert importlib.util.find_spec(package) is not None
        assert heard == []
        module = importlib.import_module(package)

    assert heard == [module]


def test_a_module_keeps_its_own_loader(package):
    with on_import({}, {package: lambda module: None}):
        module = importlib.import_module(package)

    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    assert module.__loader__ is module.__spec__.loader


def test_watching_until_the_process_ends(package, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    heard = []
    watch_imports({package: heard.append, "sys": heard.append})
    assert heard == [sys]

    module = importlib.import_module(package)

    assert heard == [sys, module]


def test_what_is_to_happen_before_an_import_is_done_once(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_later_on.py").write_text("import order_of_imports\norder_of_imports.append('module')\n")
    order = []
    monkeypatch.setitem(sys.modules, "order_of_imports", order)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    watch_imports(
        {"imported_later_on": lambda module: order.append("after")},
        before={"imported_later_on": lambda: order.append("before")},
    )

    importlib.import_module("imported_later_on")
    importlib.util.find_spec("imported_later_on")

    assert order == ["before", "module", "after"]

import importlib
import importlib.metadata
import sys
from types import ModuleType

import pytest

from memfit.frameworks.torch.simulation.stand_ins import Package, hidden, standing_in


def package(name="made_up_kernels", **options):
    modules = {name: {"answer": 42}, f"{name}.inner": {"answer": 43}}
    return Package(name, "1.2.3", modules, **options)


def test_a_missing_package_is_there_for_a_while():
    with standing_in(package()):
        module = importlib.import_module("made_up_kernels")
        assert (module.answer, module.__version__, module.inner.answer) == (42, "1.2.3", 43)
        assert importlib.metadata.version("made-up-kernels") == "1.2.3"

    assert "made_up_kernels" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("made_up_kernels")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("made-up-kernels")


def test_what_it_does_not_hold_is_missing():
    with standing_in(package()):
        module = importlib.import_module("made_up_kernels")
        with pytest.raises(AttributeError, match="module 'made_up_kernels' has no attribute 'question'"):
            module.question  # noqa: B018
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("made_up_kernels.other")


def test_what_it_does_not_hold_may_be_made_up():
    with standing_in(package(other=str)):
        assert importlib.import_module("made_up_kernels").question == "made_up_kernels.question"
        assert importlib.import_module("made_up_kernels.other.part").name == "made_up_kernels.other.part.name"


def test_pytorch_does_not_find_it():
    with standing_in(package()):
        with pytest.raises(ModuleNotFoundError):
            exec("import made_up_kernels", {"__name__": "torch.utils"})
        exec("import made_up_kernels", {"__name__": "torchvision.utils"})


def test_what_was_imported_can_be_hidden_for_a_while():
    with standing_in(package()):
        module = importlib.import_module("made_up_kernels")
        with hidden():
            assert "made_up_kernels" not in sys.modules
            with pytest.raises(ModuleNotFoundError):
                exec("import made_up_kernels", {"__name__": "torch.utils"})
        assert sys.modules["made_up_kernels"] is module


def test_an_installed_package_is_what_it_was(tmp_path, monkeypatch):
    (tmp_path / "installed_kernels.py").write_text("answer = 1\n")
    monkeypatch.syspath_prepend(tmp_path)

    with standing_in(package("installed_kernels")):
        assert importlib.import_module("installed_kernels").answer == 1
    assert importlib.import_module("installed_kernels").answer == 1
    del sys.modules["installed_kernels"]


def test_a_module_of_the_programs_own_stays(monkeypatch):
    # As programs do that need no more than the name.
    own = ModuleType("made_up_kernels")
    monkeypatch.setitem(sys.modules, "made_up_kernels", own)

    with standing_in(package()):
        assert importlib.import_module("made_up_kernels") is own
    assert sys.modules["made_up_kernels"] is own

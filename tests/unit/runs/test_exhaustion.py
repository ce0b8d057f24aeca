import errno
import json
import sys

import pytest

from memfit.runs.exhaustion import importing, is_about_memory


class ResourceExhaustedError(Exception):
    """As TensorFlow's."""


class JaxRuntimeError(RuntimeError):
    """As JAX's."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libx.so: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
        ResourceExhaustedError("failed to allocate"),
        JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"),
        ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"),
    ],
    ids=repr,
)
def test_failures_to_get_memory(error):
    assert is_about_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("cannot allocate memory"),
        OSError(errno.ENOSPC, "No space left on device"),
        ImportError("No module named x"),
        RuntimeError("shapes differ"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_other_failures(error):
    assert not is_about_memory(error)


def test_the_cause_counts_too():
    outer = RuntimeError("training failed")
    outer.__cause__ = MemoryError()
    hidden = RuntimeError("training failed")
    hidden.__context__, hidden.__suppress_context__ = MemoryError(), True

    assert is_about_memory(outer)
    assert not is_about_memory(hidden)


def test_the_import_that_was_under_way(tmp_path, monkeypatch):
    # GIVEN an installed package whose import needs too much, and a module of the script's own
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "greedy_library.py").write_text("raise MemoryError")
    (tmp_path / "own_part.py").write_text("import greedy_library")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "greedy"))

    with pytest.raises(MemoryError) as raised:
        __import__("own_part")

    assert importing(raised.value) == "greedy_library"
    sys.modules.pop("own_part", None)


def test_an_extension_that_can_not_be_loaded_has_a_name():
    assert importing(ImportError("failed to map segment", name="torch._C")) == "torch._C"


def test_a_failure_in_a_function_of_a_library_is_no_import():
    with pytest.raises(json.JSONDecodeError) as raised:
        json.loads("{")

    assert importing(raised.value) == ""

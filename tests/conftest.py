"""What every test shares: no network, generated examples without deadlines, and skips for what a machine lacks."""

import functools
import gc
import importlib.util
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from tests.browser import Browser

# Before any framework is imported: a test that would download weights fails at once and says why.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Tests run side by side: threads of one that wait for work would keep the others from theirs.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# One backend for all tests of a process; others get processes of their own.
os.environ.setdefault("KERAS_BACKEND", "torch")

# What guards find out about this machine's memory must not last from one test to the next.
os.environ["MEMFIT_CACHE"] = tempfile.mkdtemp(prefix="memfit-tests-")

# Started under nohup or in the background of a script, processes would ignore what tests send them.
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Processes that share the tests are given the width of a terminal, which commands then write for.
os.environ.pop("COLUMNS", None)

# No deadlines: a shared machine stalls for longer than any example takes.
settings.register_profile("memfit", deadline=None)
settings.register_profile("soak", deadline=None, max_examples=2_000)
settings.load_profile("memfit")

# Tests that run XLA or TensorFlow in their own process, whose threads are gone in a forked child. `make test` runs them
# apart (--part xla), so that tests with forked workers (--part others) have a process without such threads.
XLA_TESTS = tuple(
    Path(__file__).parent / "unit" / path
    for path in (
        "api/test_fit.py",
        "api/test_guarded_step.py",
        "frameworks/jax",
        "frameworks/keras",
        "frameworks/tensorflow",
        "reports/plan/test_jax_code.py",
        "test_jax.py",
        "test_keras.py",
    )
)

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@functools.cache
def find_browser() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


@functools.cache
def has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def pytest_addoption(parser):
    parser.addoption("--part", choices=("xla", "others"), help="only tests that run XLA or TensorFlow here, or no such")


def pytest_configure(config):
    # Garbage of earlier tests is not for a child to finalize: the threads that it belongs to are not there.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=gc.freeze)


def pytest_ignore_collect(collection_path, config):
    part = config.getoption("part")
    if part is None:
        return None
    is_xla = any(collection_path.is_relative_to(path) for path in XLA_TESTS)
    if part == "others":
        return True if is_xla else None
    leads_there = any(path.is_relative_to(collection_path) for path in XLA_TESTS)
    return None if is_xla or leads_there or collection_path == Path(__file__).parents[1] else True


def set_loaded_objects_aside():
    """Collections leave out what is there by now.

    Guards, simulations and tests of them collect garbage again and again. With all frameworks loaded, that would look
    at a million objects each time, for longer than most tests take.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    set_loaded_objects_aside()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    result = yield
    # Between files: nothing that tests of one share is out of sight of a search among objects, nor kept for ever.
    if nextitem is not None and nextitem.path != item.path:
        set_loaded_objects_aside()
    return result


def pytest_runtest_setup(item):
    if item.get_closest_marker("browser") and find_browser() is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on PATH")
    if item.get_closest_marker("gpu") and not has_gpu():
        pytest.skip("no CUDA device")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A browser shared by the tests of a file."""
    browser = Browser(find_browser(), tmp_path_factory.mktemp("chromium") / "profile")
    yield browser
    browser.close()


@pytest.fixture
def every_object_in_sight():
    """A search for what holds an object finds those too that collections leave out."""
    gc.unfreeze()
    yield
    set_loaded_objects_aside()

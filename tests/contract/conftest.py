"""One case for each framework; those that need another process are run there, and their outcomes told here.

Keras has one backend in each process, and KERAS_BACKEND names it: "torch" in the process of the tests. To look into
the cases of another framework, give them the process of the tests:

    KERAS_BACKEND=jax pytest tests/contract -k keras-jax --pdb
"""

import functools
from pathlib import Path

import pytest

from tests.contract import child
from tests.contract.frameworks import FRAMEWORKS


# In one order with the parameters of the tests themselves, whichever way pytest finds this file: names of cases are
# handed from process to process.
@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    """Every test for every framework; those of named jobs for every job that a framework has."""
    if "job" in metafunc.fixturenames:
        pairs = [(name, job) for name, one in FRAMEWORKS.items() for job in one.named_jobs or (("none", ""),)]
        ids = [f"{name}-{job}" for name, (job, _) in pairs]
        metafunc.parametrize(("framework", "job"), pairs, indirect=["framework"], ids=ids)
    elif "framework" in metafunc.fixturenames:
        metafunc.parametrize("framework", list(FRAMEWORKS), indirect=True)


@pytest.fixture
def framework(request):
    missing = FRAMEWORKS[request.param].missing
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    return FRAMEWORKS[request.param]


@pytest.fixture
def make_case(request, framework):
    """The class of the framework's case; skips a test that it has no notion of."""
    if not framework.is_of_this_process:
        # The other process has it.
        return None
    case = framework.load_case()
    reason = case.lacks.get(request.function.__name__)
    if reason is not None:
        pytest.skip(reason)
    return case


@pytest.fixture
def case(make_case):
    return None if make_case is None else make_case()


def framework_of(item):
    """Name of the framework that a test of the contract is for, or None."""
    callspec = getattr(item, "callspec", None)
    is_ours = item.path.parent == Path(__file__).parent and callspec is not None
    return callspec.params.get("framework") if is_ours else None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Ends a test as it ended in the process that its framework needs."""
    name = framework_of(pyfuncitem)
    if name is None or FRAMEWORKS[name].is_of_this_process:
        return None
    backend = FRAMEWORKS[name].keras_backend
    outcome = outcomes(pyfuncitem.session, backend)[pyfuncitem.nodeid]
    if outcome.kind == "failed":
        pytest.fail(f"with KERAS_BACKEND={backend}:\n{outcome.text}", pytrace=False)
    if outcome.kind == "skipped":
        pytest.skip(outcome.text)
    return True


@functools.cache
def outcomes(session, backend):
    """How all selected cases of the frameworks of a process ended, by node."""
    names = [name for name, one in FRAMEWORKS.items() if one.keras_backend == backend and not one.missing]
    nodes = [item.nodeid for item in session.items if framework_of(item) in names]
    return child.run(nodes, backend, session.config.rootpath)

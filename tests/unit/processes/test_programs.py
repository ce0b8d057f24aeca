import importlib.util

import pytest

import memfit
from memfit.processes import programs


@pytest.mark.parametrize("program", ["DRYRUN", "SUPERVISED"])
def test_the_programs_are_there_once_memfit_is(program):
    assert memfit.__all__

    *_, option, module = getattr(programs, program)

    assert option == "-m"
    assert importlib.util.find_spec(module) is not None

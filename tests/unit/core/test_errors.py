import inspect
import re
import tomllib
from pathlib import Path

import pytest

from memfit.core import errors

TREE = {
    "MemfitError": Exception,
    "BadInput": errors.MemfitError,
    "InvalidSize": errors.BadInput,
    "UnknownDevice": errors.BadInput,
    "BadBatch": errors.BadInput,
    "BadLoss": errors.BadInput,
    "BadOptimizer": errors.BadInput,
    "BadModel": errors.BadInput,
    "BadTarget": errors.BadInput,
    "BadFile": errors.BadInput,
    "StepFailed": errors.MemfitError,
    "MissingDependency": errors.MemfitError,
}


def classes():
    return {name: value for name, value in vars(errors).items() if inspect.isclass(value)}


def test_the_tree_is_complete():
    assert set(classes()) == set(TREE)


@pytest.mark.parametrize(("name", "parent"), TREE.items())
def test_each_error_hangs_where_it_should(name, parent):
    error = getattr(errors, name)

    assert error.__mro__[1] is parent
    assert error.exit_code == 2 if issubclass(error, errors.MemfitError) else True


def test_bad_input_can_be_caught_as_a_value_error():
    with pytest.raises(ValueError, match="24 bananas"):
        raise errors.InvalidSize("24 bananas")


def test_the_docstring_draws_every_error():
    drawn = errors.__doc__

    assert [name for name in classes() if name not in drawn] == []


def test_install_hints_name_extras_that_have_the_package():
    settings = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    extras = settings["project"]["optional-dependencies"]

    for package, extra in errors.EXTRAS.items():
        assert any(re.match(rf"{package}\b", requirement) for requirement in extras[extra]), package

"""Every adapter has what the Protocol asks for, by the same names."""

import importlib
import importlib.util
import inspect

import pytest

from memfit.core.adapter import Adapter

ASKED = {name: value for name, value in vars(Adapter).items() if inspect.isfunction(value) and name[0] != "_"}


@pytest.mark.parametrize("framework", ["torch", "keras", "jax"])
@pytest.mark.parametrize("name", ASKED)
def test_adapters_take_what_the_protocol_says(framework, name):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    adapter = importlib.import_module(f"memfit.frameworks.{framework}.adapter")

    expected = list(inspect.signature(ASKED[name]).parameters)[1:]

    assert list(inspect.signature(getattr(adapter, name)).parameters) == expected


def test_something_is_asked():
    assert {"open_job", "planning", "apply", "named_job"} <= set(ASKED)

"""Whatever the command line does has a public name in Python, and the reverse, but for what only one of them can do."""

import argparse
from collections.abc import Iterator

import pytest

import memfit
from memfit.commands import build_parser

NAMES = {
    "calibrate": "calibrate",
    "compare": "compare",
    "data bench": "bench_data",
    "data convert": "convert_data",
    "data inspect": "inspect_data",
    "devices": "list_devices",
    "diff": "diff",
    "diff --script": "diff",
    "dryrun": "dryrun",
    "estimate": "estimate",
    "max-batch": "max_batch",
    "plan": "plan",
    "plan --script": "plan_script",
    "run": "run",
    "verify": "verify",
}
"""Each command, and the function of `memfit` that does the same."""

SHELL_ONLY = {"completion": "writes what a shell reads to complete words"}

PYTHON_ONLY = {
    "Guard": "is put into a training loop",
    "ensemble": "takes functions and loaders",
    "find_device": "is what --device does",
    "fit": "takes a compiled model and arrays",
    "load_plan": "gives a plan to apply to live objects",
    "named_job": "is what a target such as timm:resnet50 does",
    "open_array": "gives slices of an array",
    "rescue": "is for a block of Python; `run --rescue` does it for a script",
    "search": "takes a function to run",
    "simulate": "is for a block of Python",
    "stream": "gives batches to a training loop",
}
"""Public functions without a command, and why."""


def commands_of(parser: argparse.ArgumentParser, prefix: str = "") -> Iterator[str]:
    children = next((a for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None)
    if children is None:
        yield prefix.strip()
        # A mode in which a command takes another kind of input is a verb of its own.
        if any("--script" in action.option_strings for action in parser._actions):
            yield f"{prefix} --script".strip()
        return
    for name, child in children.choices.items():
        yield from commands_of(child, f"{prefix} {name}")


def without_name(commands: Iterator[str]) -> list[str]:
    return [command for command in commands if command not in NAMES and command not in SHELL_ONLY]


def test_every_command_has_a_public_name():
    commands = list(commands_of(build_parser()))

    assert without_name(iter(commands)) == [], "give it a public function, and list both in NAMES"
    assert sorted(commands) == sorted({*NAMES, *SHELL_ONLY}), "a command that is listed here is gone"
    assert [name for name in NAMES.values() if name not in memfit.__all__] == []
    assert [name for name in NAMES.values() if not callable(getattr(memfit, name))] == []


def test_every_public_function_has_a_command_or_a_reason():
    verbs = {name for name in memfit.__all__ if name[0].islower() and callable(getattr(memfit, name))} | {"Guard"}

    assert verbs == {*NAMES.values(), *PYTHON_ONLY}


def test_a_command_without_a_name_is_caught():
    parser = argparse.ArgumentParser()
    parser.add_subparsers().add_parser("surprise")

    assert without_name(commands_of(parser)) == ["surprise"]


@pytest.mark.parametrize("name", ["integrations", "jax", "keras"])
def test_modules_for_one_library_are_no_verbs(name):
    assert name not in NAMES.values()

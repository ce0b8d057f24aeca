"""The parser of the command line: argparse, with spellings of other tools, suggestions, and errors `main` can catch."""

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

ALIASES = {
    "--batch-size": ("--bs", "--batch", "--per-device-train-batch-size"),
    "--count": ("--num-devices", "--num-gpus", "--gpus", "--nproc-per-node", "--num-processes"),
    "--device": ("--devices", "--gpu"),
    "--html": ("--report",),
    "--image-size": ("--img-size", "--imgsz", "--img", "--input-size", "--resolution"),
    "--num-workers": ("--workers", "--dataloader-num-workers"),
    "--optimizer": ("--optim", "--opt"),
    "--precision": ("--dtype", "--mixed-precision"),
    "--save": ("--output", "--out"),
    "--sequence-length": ("--seq", "--seq-len", "--seqlen", "--seq-length", "--max-length", "--block-size"),
    "--steps": ("--max-steps", "--num-steps"),
    "--workers": ("--num-workers", "--dataloader-num-workers"),
}
"""What people type, for whom another tool's name of an option is the usual one."""


class UsageError(Exception):
    """Arguments that can't be parsed.

    Args:
        parser: of the command that was meant.
        message: what was given, and what was expected.
    """

    def __init__(self, parser: argparse.ArgumentParser, message: str) -> None:
        super().__init__(message)
        self.parser = parser


class Parser(argparse.ArgumentParser):
    """A parser that suggests what was meant, and leaves it to `main` to report what it can't read."""

    def error(self, message: str) -> NoReturn:
        """Raises a `UsageError`, where argparse would print and exit."""
        raise UsageError(self, message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # A private name that has stayed since Python 2.7; without it, argparse's own message is all there is.
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        message = f"there is no {value!r}.{suggestion(str(value), choices)} Choose from {', '.join(choices)}"
        if isinstance(action, argparse._SubParsersAction):
            message += _for_target(str(value))
        raise argparse.ArgumentError(action, message)

    def _get_option_tuples(self, option_string: str) -> list[tuple[Any, ...]]:
        # A beginning is ambiguous only where several options have it: memfit's own names come before aliases.
        matches = super()._get_option_tuples(option_string)
        own = [match for match in matches if match[1] in match[0].option_strings]
        return own or matches[:1]


def add_aliases(parser: argparse.ArgumentParser) -> None:
    """Lets every option be spelled as other tools spell it, and with underscores; help shows memfit's own names."""
    taken = set(parser._option_string_actions)
    for action in list(parser._actions):
        others = [alias for option in action.option_strings for alias in ALIASES.get(option, ())]
        others += [option.replace("-", "_").replace("__", "--", 1) for option in (*action.option_strings, *others)]
        added = [option for option in dict.fromkeys(others) if option.startswith("--") and option not in taken]
        for option in added:
            # One more spelling of the same action: what it stores, and its default, are those of the first.
            parser._option_string_actions[option] = action
        taken.update(added)


def aliases_of(parser: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    """Further spellings of an option, without those that only have underscores for dashes."""
    spellings = [option for option, other in parser._option_string_actions.items() if other is action]
    return [option for option in spellings if option not in action.option_strings and "_" not in option]


def nearest_options(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """The options that those which aren't known come nearest to."""
    known = [option for option in parser._option_string_actions if option.startswith("--") and "_" not in option]
    given = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    return "".join(suggestion(option.replace("_", "-"), known) for option in given[:1])


def suggestion(given: str, known: Iterable[str]) -> str:
    """A sentence on the known name that comes nearest, with a space before it; "" where none does.

    >>> suggestion("estimat", ["estimate", "plan"]), suggestion("x", ["estimate"])
    (" Did you mean 'estimate'?", '')
    """
    close = difflib.get_close_matches(given.lower(), list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _for_target(given: str) -> str:
    """What to write where a script or a model stands in the place of a command."""
    if given.endswith(".py"):
        return f". To run a script: memfit dryrun {given}, or memfit run {given}"
    return f". To estimate a model: memfit estimate {given}" if ":" in given else ""

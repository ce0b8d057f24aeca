"""The command line: one module per subcommand, which parses, calls the public API and hands the result to a reporter.

Exit codes: 0 it fits (or the command did its work, or nothing was asked for and help was shown), 1 a fault of memfit's
own, 2 bad usage or bad input, 3 it does not fit, 4 a script that was run failed, 5 it ended without an optimizer step
or put nothing on the device, 130 interrupted. `run` returns the script's own exit code, 3 where memory ran out and
nothing is left to try, or 128 and the number of a signal.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol

import memfit
from memfit.commands import output
from memfit.commands.parser import Parser, UsageError, add_aliases, nearest_options
from memfit.core import interrupts as _interrupts
from memfit.core.errors import MemfitError
from memfit.core.progress import announce

EXIT_FITS = 0
EXIT_FAULT = 1
EXIT_BAD_USAGE = 2
EXIT_DOES_NOT_FIT = 3
EXIT_SCRIPT_FAILED = 4
EXIT_NO_STEP = 5
EXIT_INTERRUPTED = 130


class Command(Protocol):
    """A subcommand: a module with a docstring and two functions."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the command's arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Does the work and returns the exit code."""


def _commands() -> dict[str, Command]:
    from memfit.commands import (
        calibrate,
        compare,
        completion,
        data,
        devices,
        diff,
        dryrun,
        estimate,
        max_batch,
        plan,
        run,
        verify,
    )

    return {
        "estimate": estimate,
        "dryrun": dryrun,
        "plan": plan,
        "run": run,
        "max-batch": max_batch,
        "compare": compare,
        "data": data,
        "verify": verify,
        "calibrate": calibrate,
        "diff": diff,
        "devices": devices,
        "completion": completion,
    }


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = Parser(
        prog="memfit",
        description="Prevents and survives out-of-memory errors in training: estimate, plan, guard, stream.",
        epilog="Exit codes: 0 fits, 2 bad usage or input, 3 does not fit, 4 and 5 scripts only, 130 interrupted",
    )
    parser.add_argument("--version", action="version", version=f"memfit {memfit.__version__}")
    parser.set_defaults(run=_print_help, parser=parser)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in _commands().items():
        summary, _, rest = (command.__doc__ or "").strip().partition("\n")
        child = subparsers.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=rest.strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        child.set_defaults(run=command.run, parser=child)
        command.add_arguments(child)
        add_aliases(child)
    return parser


def _print_help(arguments: argparse.Namespace) -> int:
    """What is done where a command is missing."""
    arguments.parser.print_help()
    return EXIT_FITS


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["help"]:
        given = [*given[1:], "--help"]
    try:
        output.fill_standard_streams()
        _interrupts.raise_again()
        return _main(given)
    except OSError as error:
        if not output.is_of_output(error):
            raise
        # The rest goes nowhere, and the interpreter's own last flush has nothing to complain about.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return EXIT_FITS  # the reader went away, as in `memfit devices | head`
        with contextlib.suppress(OSError):
            announce(f"the answer can't be written to standard output: {error.strerror}.")
        return EXIT_BAD_USAGE
    finally:
        # The interpreter's own end may be interrupted, too.
        _interrupts.end_at_once()


def _main(given: list[str]) -> int:
    # Where arguments can't be parsed, this is all that is known of what was asked for.
    as_json = "--json" in given
    try:
        parsed = _parse(given)
        as_json = getattr(parsed, "json", False)
        code: int = parsed.run(parsed)
        # What is still buffered must fail here rather than when the interpreter ends.
        sys.stdout.flush()
        return code
    except UsageError as error:
        error.parser.print_usage(sys.stderr)
        output.print_error(error, EXIT_BAD_USAGE, as_json=as_json, by=f"{error.parser.prog}: error")
        raise SystemExit(EXIT_BAD_USAGE) from None
    except MemfitError as error:
        return output.print_error(error, error.exit_code, as_json=as_json)
    except KeyboardInterrupt:
        return output.print_error(KeyboardInterrupt("interrupted"), EXIT_INTERRUPTED, as_json=as_json)
    except Exception as error:
        # A fault of memfit's own, whose traceback Python prints.
        if as_json:
            output.print_json(output.error_document(error, EXIT_FAULT))
        raise


def _parse(given: list[str]) -> argparse.Namespace:
    """The arguments, or a `UsageError`."""
    parser = build_parser()
    parsed, unknown = parser.parse_known_args(given)
    if unknown:
        runs_script = parsed.command in ("dryrun", "run") or getattr(parsed, "script", None) is not None
        hint = ". Options of the script go after the script" if runs_script else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}.{nearest_options(parsed.parser, unknown)}")
    return parsed

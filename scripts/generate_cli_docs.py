"""Writes docs/reference/cli.md from the parser of the command line, so that the two can't disagree.

    python scripts/generate_cli_docs.py           write the file
    python scripts/generate_cli_docs.py --check   exit with 1 if it is out of date

The arguments are read from the parser itself, not from the text of `--help`, whose layout differs between versions of
Python.
"""

import argparse
import sys
from pathlib import Path

from memfit.commands import build_parser
from memfit.commands.parser import aliases_of

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"

_HEAD = """\
# Command line

Written by `python scripts/generate_cli_docs.py`; don't edit by hand.

{description}

Everything here has a public name in Python and the reverse: each command parses its arguments, calls the function of
that name in `memfit` (`plan --script`: `plan_script`; `data inspect`: `inspect_data`, and so on) and prints the result.
Reports go to standard output, progress and errors to standard error. An error is one message that says what was given,
what was expected and what to do. Control characters in names, paths and texts of exceptions are escaped.

With `--json`, standard output is one JSON document in every case. If there is no answer it is
`{{"error": {{"type": "UnknownDevice", "message": "no device is called ...", "exit_code": 2}}}}`; `type` is the name of
the exception in Python, or `UsageError` for arguments that can't be parsed, and the message is the one on standard
error. Where nothing fits, `plan` gives the smallest plan and the error in one document.

`--device` takes several devices, `-d t4,a10g` or `-d t4 -d a10g`: `estimate`, `max-batch` and `plan` then give a table
with a row for each, `compare` a column for each, and `--json` a list. Dry runs, pages, saved plans and code are for one
device.

Options may be written with underscores for dashes (`--batch_size`), shortened where that is not ambiguous (but not
where a script follows), and as other tools call them; the tables list those names. Precisions may be called as
Lightning, Keras and PyTorch call them: `16-mixed`, `bf16-mixed`, `32-true`, `mixed_float16`, `torch.bfloat16`. `fp16`
and `bf16` are weights of that type, though accelerate means autocast by them: that is `amp-fp16` and `amp-bf16` here.

`memfit completion bash`, `zsh` or `fish` writes what lets the shell complete commands, options and devices.

## Exit codes

| code | meaning |
| ---: | --- |
| 0 | the step fits, or the command did its work; also `memfit` alone, which shows its help |
| 1 | a fault in memfit itself: please report it, with the traceback |
| 2 | bad usage or bad input; also a step whose own code fails while it is traced |
| 3 | it does not fit; of several models or devices: one of them; `plan`: nothing allowed; `run`: nothing left to try |
| 4 | `dryrun`, `plan --script`: the script failed for another reason than memory, or its process crashed |
| 5 | `dryrun`, `plan --script`: the script ended without an optimizer step |
| 130 | interrupted |
| others | `run`: the script's own exit code, or 128 and the number of the signal that ended it |

A job whose fate is unknown, because the device's memory is, exits with 0.
"""


def render() -> str:
    """The whole page."""
    parser = build_parser()
    parts = [_HEAD.format(description=parser.description)]
    commands = _children(parser)
    assert commands, "the parser has no commands"
    for name, child in commands.items():
        parts.append(_section(f"## memfit {name}", child))
        parts += [_section(f"### memfit {name} {action}", part) for action, part in _children(child).items()]
    return "\n".join(parts)


def _children(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _section(heading: str, parser: argparse.ArgumentParser) -> str:
    # Commands of a command have parts of their own on the page.
    hidden = (argparse._HelpAction, argparse._SubParsersAction)
    actions = [a for a in parser._actions if not isinstance(a, hidden) and a.help != argparse.SUPPRESS]
    rows = [f"| {_spelling(action)} | {_meaning(action)}{_others(parser, action)} |" for action in actions]
    table = ["| argument | meaning |", "| --- | --- |", *rows, ""] if rows else []
    return "\n".join([heading, "", parser.description or "", "", *table, "```text", parser.epilog or "", "```", ""])


def _spelling(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
    if action.nargs == argparse.REMAINDER and action.option_strings:
        value += " ARGS ..."
    if not action.option_strings:
        spelled = action.metavar or action.dest
        return f"`{spelled} ...`" if action.nargs in ("+", argparse.REMAINDER) else f"`{spelled}`"
    if action.choices is not None:
        value = "NAME"
    return ", ".join(f"`{option} {value}`".replace(" `", "`") for option in action.option_strings)


def _meaning(action: argparse.Action) -> str:
    text = (action.help or "").replace("|", "\\|")
    if action.choices is not None:
        text += f"; one of {', '.join(f'`{choice}`' for choice in action.choices)}"
    return text


def _others(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    names = aliases_of(parser, action)
    return f"; also {', '.join(f'`{name}`' for name in names)}" if names else ""


def main() -> int:
    """Writes or checks the page."""
    parser = argparse.ArgumentParser(description="Write docs/reference/cli.md from the command line's parser.")
    parser.add_argument("--check", action="store_true", help="only say whether the file is up to date")
    text = render()
    if parser.parse_args().check:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print("docs/reference/cli.md is out of date: run `python scripts/generate_cli_docs.py`.", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A script that lets the shell complete memfit's commands, options and devices.

Examples:
  memfit completion bash >> ~/.bashrc
  memfit completion zsh >> ~/.zshrc
  memfit completion fish > ~/.config/fish/completions/memfit.fish

It runs no Python on completion; generate it again after an update of memfit.

Exit codes: 0 written, 2 bad usage
"""

import argparse
import shlex
from collections.abc import Iterator

from memfit.catalogue import list_devices
from memfit.commands import EXIT_FITS

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
# Completion of memfit. Written by `memfit completion {shell}`.
_memfit() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" command="memfit" i
    # --device=t4 comes as three words.
    if [[ "$cur" == "=" ]]; then cur=""; elif [[ "$prev" == "=" ]]; then prev="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$command ${{COMP_WORDS[i]}}" in
            {commands}) command="$command ${{COMP_WORDS[i]}}" ;;
            # What follows a script is its own.
            "memfit dryrun "*.py|"memfit run "*.py) return ;;
        esac
    done
    local words="" options="" list="" before=""
    case "$command $prev" in
{values}
    esac
    if [[ -n "$list" ]]; then
        if [[ "$cur" == *,* ]]; then before="${{cur%,*}},"; cur="${{cur##*,}}"; fi
        COMPREPLY=($(compgen -P "$before" -W "$list" -- "$cur"))
        return
    fi
    case "$command" in
{options}
    esac
    if [[ "$cur" == -* ]]; then words="$options"; fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _memfit memfit
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"{', '.join(SHELLS[:-1])} or {SHELLS[-1]}")


def run(arguments: argparse.Namespace) -> int:
    """Writes the script."""
    from memfit.commands import build_parser

    parser = build_parser()
    print(_fish(parser) if arguments.shell == "fish" else _bash(parser, arguments.shell), end="")
    return EXIT_FITS


def _parsers(
    parser: argparse.ArgumentParser, name: str = "memfit"
) -> Iterator[tuple[str, argparse.ArgumentParser, dict[str, str]]]:
    """Every command by what a user writes, its parser, and its own commands with their summaries."""
    children: dict[str, str] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            children = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for child, other in action.choices.items():
                yield from _parsers(other, f"{name} {child}")
    yield name, parser, children


def _values(action: argparse.Action) -> list[str]:
    """What an argument can be, where that is known."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    return [device.name for device in list_devices()] if action.dest in ("device", "name") else []


def _shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The arguments of a command that its help shows."""
    return [action for action in parser._actions if action.help != argparse.SUPPRESS]


def _bash(parser: argparse.ArgumentParser, shell: str) -> str:
    all_commands = list(_parsers(parser))
    values, options = [], []
    for name, command, children in all_commands:
        words = list(children)
        spelled: list[str] = []
        for action in _shown(command):
            listed = [] if isinstance(action, argparse._SubParsersAction) else _values(action)
            words += [] if action.option_strings else listed
            spelled += action.option_strings
            if action.option_strings and listed:
                patterns = "|".join(f'"{name} {option}"' for option in action.option_strings)
                values.append(f"        {patterns}) list={shlex.quote(' '.join(listed))} ;;")
        both = f"words={shlex.quote(' '.join(words))} options={shlex.quote(' '.join(spelled))}"
        options.append(f'        "{name}") {both} ;;')
    commands = "|".join(f'"{name}"' for name, _, _ in all_commands if name != "memfit")
    script = _BASH.format(shell=shell, commands=commands, values="\n".join(values), options="\n".join(options))
    # zsh runs what is written for bash.
    head = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
    return head + script if shell == "zsh" else script


def _fish(parser: argparse.ArgumentParser) -> str:
    lines = ["# Completion of memfit. Written by `memfit completion fish`."]
    for name, other, children in _parsers(parser):
        words = name.split()[1:]
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in words)
        if children:
            inside = f"not __fish_seen_subcommand_from {' '.join(children)}"
            inside = f"{seen}; and {inside}" if seen else inside
            for child, summary in children.items():
                lines.append(f"complete -c memfit -f -n {shlex.quote(inside)} -a {child} -d {shlex.quote(summary)}")
        for action in _shown(other):
            if isinstance(action, argparse._SubParsersAction):
                continue
            parts = ["complete -c memfit", f"-n {shlex.quote(seen)}" if seen else ""]
            for option in action.option_strings:
                parts.append(f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}")
            listed = _values(action)
            if not action.option_strings and not listed:
                continue
            if listed:
                parts.append(f"-x -a {shlex.quote(' '.join(listed))}")
            elif action.nargs != 0:
                parts.append("-r")
            parts.append(f"-d {shlex.quote(action.help or '')}")
            lines.append(" ".join(filter(None, parts)))
    return "\n".join(lines) + "\n"

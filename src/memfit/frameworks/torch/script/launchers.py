"""Launchers (`torchrun`, `accelerate launch` and what is built on them): the script they start is run in place.

The launcher itself runs as it is, so that its options, its files of settings and its environment count. Where it would
start a process for each device, the first of them is run in this process, with what the launcher would tell it.
"""

import argparse
import os
import shutil
import sys
import tokenize
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import torch.distributed

from memfit.core.patching import Replacement
from memfit.frameworks.torch.script.processes import environment
from memfit.frameworks.torch.simulation import distributed

ACCELERATE = "accelerate.utils.launch"
# Options of the interpreter that take a word of their own.
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")


class LaunchedProgram(NamedTuple):
    """What Python runs: a file, or a module as for `python -m`, and what it is given."""

    script: str
    module: bool
    arguments: tuple[str, ...]


def program_of(words: Sequence[str]) -> LaunchedProgram:
    """The program that a command starts; exits with a message where that is none of Python's.

    >>> program_of(["/usr/bin/python3", "-u", "-m", "trainer.run", "--lr", "1"])
    LaunchedProgram(script='trainer.run', module=True, arguments=('--lr', '1'))
    """
    first, *rest = map(str, words)
    if first != sys.executable and not os.path.basename(first).startswith("python"):
        path = first if os.path.isfile(first) else shutil.which(first)
        try:
            with tokenize.open(path or "") as file:
                compile(file.read(), path or "", "exec", dont_inherit=True)
        except (OSError, SyntaxError, ValueError):
            sys.exit(
                f"memfit: the launcher would start {first!r}, which is not a Python script, so that it can't be "
                "simulated. Let it start the script that trains, without --no-python."
            )
        return LaunchedProgram(str(path), False, tuple(rest))
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
        del rest[: 2 if rest[0] in _WITH_VALUE else 1]
    if len(rest) > 1 and rest[0] == "-m":
        return LaunchedProgram(rest[1], True, tuple(rest[2:]))
    if not rest or rest[0] in ("-m", "-c", "-"):
        sys.exit(
            f"memfit: the launcher would start {' '.join(words)!r}, which names no script. Give it one that trains."
        )
    return LaunchedProgram(rest[0], False, tuple(rest[1:]))


def launched_environment(config: Any) -> dict[str, str]:
    """What the first process of the first node is told (`LaunchConfig`, `LocalElasticAgent`)."""
    local, nodes = int(config.nproc_per_node), int(config.max_nodes)
    host, _, port = str(config.rdzv_endpoint or "").partition(":")
    world = str(local * nodes)
    return {
        # Also where there is but one.
        **distributed.environment(2),
        "ROLE_RANK": "0",
        "ROLE_NAME": str(config.role),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": str(local),
        "ROLE_WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": str(nodes),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        "TORCHELASTIC_RUN_ID": str(config.run_id),
        "MASTER_ADDR": host or "localhost",
        # A launcher of a single node chooses a free one.
        "MASTER_PORT": port if port not in ("", "0") else "29500",
    }


def _refuse(program: LaunchedProgram) -> NoReturn:
    raise RuntimeError(f"a launcher can't start {program.script!r} here: give the whole command to `memfit dryrun`.")


@dataclass(eq=False)
class Launchers:
    """Stands in for what starts a process per device."""

    has_devices: Callable[[int], None]
    report: Callable[[str, str], None]
    run: Callable[[LaunchedProgram], None] = _refuse  # runs a program in this process

    def replacements(self) -> list[Replacement]:
        """What to put in place of torchrun's."""
        if not torch.distributed.is_available():
            return []
        from torch.distributed.elastic.utils.api import macros
        from torch.distributed.launcher.api import elastic_launch

        launchers = self

        def launch(self: Any, /, *args: Any) -> dict[int, Any]:
            arguments = macros.substitute(list(args), "0")
            variables = launched_environment(self._config)
            launchers.has_devices(int(self._config.nproc_per_node))
            if variables["WORLD_SIZE"] != "1":
                text = f"of {variables['WORLD_SIZE']} launched processes only the first was run, in this process"
                launchers.report(distributed.SPAWNED, text)
            with environment(variables, restores_all=True):
                if callable(self._entrypoint):
                    return {0: self._entrypoint(*arguments)}
                launchers.run(program_of([self._entrypoint, *arguments]))
                return {0: None}

        return [Replacement(elastic_launch, "__call__", launch)]

    def of_accelerate(self, module: ModuleType) -> list[Replacement]:
        """What to put in place of accelerate's start of a single process; of several torchrun's is used.

        Accelerate asks PyTorch for the number of devices. Who asks for several processes has the devices.
        """
        plain: Callable[[Any], tuple[list[str], dict[str, str]]] = module.prepare_simple_launcher_cmd_env

        def prepare_simple_launcher_cmd_env(args: Any) -> NoReturn:
            words, variables = plain(args)
            with environment(variables, restores_all=True):
                self.run(program_of(words))
            sys.exit(0)

        plain_parse: Callable[..., Any] = argparse.ArgumentParser.parse_known_args

        def parse_known_args(parser: Any, /, *args: Any, **kwargs: Any) -> Any:
            parsed = plain_parse(parser, *args, **kwargs)
            options = vars(parsed[0])
            if {"num_processes", "num_machines", "training_script"} <= options.keys() and not options.get("use_cpu"):
                self.has_devices(max(1, (options["num_processes"] or 1) // (options["num_machines"] or 1)))
            return parsed

        return [
            Replacement(module, "prepare_simple_launcher_cmd_env", prepare_simple_launcher_cmd_env),
            Replacement(argparse.ArgumentParser, "parse_known_args", parse_known_args),
        ]

"""A training script that goes on when memory runs out.

Examples:
  memfit run train.py --batch-size 64
  memfit run --budget 8GiB --checkpoint runs/first --html memory.html train.py
  memfit run --rescue -m my_package.train --config large.yaml

Everything after SCRIPT, or after the name of the module, belongs to the script. It runs unmodified in a process of its
own, under a limit just below the container's, so that a silent kill becomes an exception where that is possible. When
memory runs out all the same, it is started again from its last checkpoint with settings that need less memory.

Exit codes: 0 the script got through, or its own code when it ends by itself, 3 memory ran out and nothing is left to
try, 2 bad usage or input, 130 interrupted, 128 and the number of the signal that ended it
"""

import argparse

from memfit.api import run as _run
from memfit.commands import output, targets
from memfit.core.progress import announce
from memfit.core.supervised import RunOutcome, SupervisedRun
from memfit.reports.run import figures as supervised_figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    # The script's own options must not be taken for short forms of ours.
    parser.allow_abbrev = False
    parser.usage = "memfit run [OPTIONS] SCRIPT ARGS... | memfit run [OPTIONS] -m MODULE ARGS..."
    parser.add_argument(
        "--budget", metavar="SIZE", help="memory that the script may use, such as 8GiB; default: no limit"
    )
    parser.add_argument(
        "--checkpoint", metavar="FOLDER", help="folder of the guard's checkpoints, from which attempts resume"
    )
    parser.add_argument(
        "--retries", type=int, default=5, metavar="N", help="how often the script may be restarted; default 5"
    )
    parser.add_argument(
        "--rescue", action="store_true", help="retry operations that run out of memory, from the first attempt on"
    )
    parser.add_argument("--verbose", action="store_true", help="show the script's whole traceback where memory ran out")
    targets.add_script_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the script, reports, and returns its exit code."""
    script, given = targets.script_of(arguments)
    targets.check_at_least(arguments, retries=0)
    if arguments.html:
        output.check_writable(arguments.html)
    result = _run.run(
        script,
        given,
        budget=arguments.budget,
        checkpoint=arguments.checkpoint,
        retries=arguments.retries,
        rescue=arguments.rescue,
        module=arguments.module is not None,
        quiet_output=arguments.json,
        verbose=arguments.verbose,
    )
    _report(result, arguments)
    return result.exit_code


def _report(result: SupervisedRun, arguments: argparse.Namespace) -> None:
    if arguments.json:
        output.print_json(result.to_json())
    elif len(result.attempts) > 1 or result.outcome is RunOutcome.OUT_OF_MEMORY:
        # Standard output is the script's.
        output.print_report(supervised_figures.report(result, brief=True), stderr=True)
    elif result.outcome is not RunOutcome.INTERRUPTED:
        announce(supervised_figures.verdict(result))
    if arguments.html:
        result.report(arguments.html)
        announce(f"page written to {arguments.html}")

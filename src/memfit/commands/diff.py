"""What a real GPU was asked for against what memfit simulates: a memory snapshot and the program that made it.

Examples:
  memfit diff snapshot.pickle --device rtx-4090 --script train.py --batch-size 64
  memfit diff snapshot.pickle --device h100-80gb --stack torch2.6-cu124 --job train.py:job
  memfit diff snapshot.pickle --json --html diff.html --script -m my_package.train > diff.json

SNAPSHOT is a file of `torch.cuda.memory._dump_snapshot`, as it is or packed with xz, gzip, bzip2 or zip. TARGET of
--job is as for `memfit estimate`. Everything after --script belongs to the script, so it comes last; the script runs
as for `memfit dryrun`. Allocations of both are aligned by size, operator and order; what is missing, invented, in
another order or freed at another time is listed by operator and line, with its effect on the peak.

Exit codes: 0 compared, whatever differs; 2 bad usage or input, or the program failed; 130 interrupted
"""

import argparse

from memfit.commands import EXIT_FITS, output, targets
from memfit.core.errors import BadInput
from memfit.core.job import Job

_STEPS = 10  # as for `memfit.diff`, which takes time to import
_JOB_OPTIONS = ("batch_size", "sequence_length", "image_size", "optimizer", "precision", "workers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    # The script's own options must not be taken for short forms of ours.
    parser.allow_abbrev = False
    parser.usage = (
        "memfit diff SNAPSHOT [OPTIONS] --job TARGET | memfit diff SNAPSHOT [OPTIONS] --script SCRIPT ARGS..."
    )
    parser.add_argument("snapshot", metavar="SNAPSHOT", help="the file of the snapshot")
    targets.add_device_argument(parser, "the GPU that made the snapshot (`memfit devices`); this machine's by default")
    parser.add_argument(
        "--steps", type=int, metavar="N", help=f"optimizer steps of a script to simulate; default {_STEPS}"
    )
    parser.add_argument(
        "--history", type=int, metavar="N", help="number of the device in the snapshot, where it has several"
    )
    parser.add_argument("--json", action="store_true", help="write JSON to standard output")
    parser.add_argument("--html", metavar="FILE", help="write a self-contained page")
    parser.add_argument("--job", metavar="TARGET", help="the program: FILE.py:function, or a named model")
    parser.add_argument(
        "--script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="the program: a script, or -m MODULE, and arguments",
    )
    parser.set_defaults(**dict.fromkeys(_JOB_OPTIONS))


def run(arguments: argparse.Namespace) -> int:
    """Compares and reports."""
    # The reports of a difference need what other commands do without.
    from memfit.api.diff import diff
    from memfit.reports.diff import figures

    targets.check_one_device(arguments, "diff")
    targets.check_at_least(arguments, steps=1, history=0)
    if arguments.html:
        output.check_writable(arguments.html)
    with output.progress("simulating", quiet=arguments.json):
        subject, given, module = _subject(arguments)
        result = diff(
            arguments.snapshot,
            subject,
            given,
            device=targets.device_of(arguments),
            module=module,
            steps=arguments.steps or _STEPS,
            history=arguments.history,
        )
    if arguments.html:
        result.report(arguments.html)
    output.print_result(result, figures.report, as_json=arguments.json)
    if arguments.html and not arguments.json:
        print(f"\npage written to {arguments.html}")
    return EXIT_FITS


def _subject(arguments: argparse.Namespace) -> tuple[str | Job, list[str], bool]:
    """The job, or the script with its arguments and whether it is a module."""
    if (arguments.job is None) == (not arguments.script):
        raise BadInput(
            "the program that made the snapshot is needed, once: --script train.py ARGS..., or --job FILE.py:function."
        )
    if arguments.job is not None:
        if arguments.steps is not None:
            raise BadInput("--steps is for a script; a job has its own.")
        return targets.load_job(arguments.job, arguments), [], False
    if not arguments.devices:
        command = "memfit diff SNAPSHOT --device a100-40gb --script train.py ..."
        targets.check_device_before_script(arguments.script, command)
    return targets.program_of(arguments.script)

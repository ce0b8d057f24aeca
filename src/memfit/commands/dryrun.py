"""An unmodified training script on a GPU that is not there.

Examples:
  memfit dryrun --device a100-40gb train.py --batch-size 64
  memfit dryrun -d t4 --scan 500 --html memory.html train.py
  memfit dryrun -d h100-80gb --count 8 -m my_package.train --config large.yaml

Everything after SCRIPT, or after the name of the module, belongs to the script. It runs in a process of its own in
which PyTorch sees the device; host tensors, data and output are real, tensors on the device have shapes and no
values. Files that it writes, changes or removes are its own: yours stay as they are.

Exit codes: 0 fits, 3 does not fit, 4 the script failed, 5 it took no optimizer step or put nothing on the device,
2 bad usage or input, 130 interrupted
"""

import argparse

from memfit.api import dryrun as _api
from memfit.commands import EXIT_INTERRUPTED, output, targets
from memfit.core.dryrun import DryRun, DryRunOptions
from memfit.core.progress import announce
from memfit.processes.launch import Interrupted
from memfit.reports.dryrun import figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    # The script's own options must not be taken for short forms of ours.
    parser.allow_abbrev = False
    parser.usage = "memfit dryrun [OPTIONS] SCRIPT ARGS... | memfit dryrun [OPTIONS] -m MODULE ARGS..."
    targets.add_device_argument(parser, "a CUDA device (`memfit devices`), or a size such as 24GiB")
    parser.add_argument(
        "--count",
        type=int,
        default=1,
        metavar="N",
        help="number of devices that PyTorch sees; figures are per device; default 1",
    )
    parser.add_argument(
        "--steps", type=int, default=3, metavar="N", help="optimizer steps before the script is stopped; default 3"
    )
    parser.add_argument(
        "--scan", type=int, metavar="N", help="scan N batches of the script's loader and run from the largest one"
    )
    parser.add_argument(
        "--keep-checkpoints", metavar="FOLDER", help="keep the script's checkpoints there; default: discard them"
    )
    parser.add_argument(
        "--allow-writes",
        metavar="FOLDER",
        action="append",
        default=[],
        help="let the script write there for real, such as downloads; can be repeated",
    )
    targets.add_script_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the script, reports, and says by its exit code how it went."""
    script, given = targets.script_of(arguments)
    if arguments.device is None:
        targets.check_device_before_script(given, "memfit dryrun --device a100-40gb train.py ...")
    targets.check_one_device(arguments, "a dry run")
    targets.check_at_least(arguments, count=1, steps=1, scan=1)
    if arguments.html:
        output.check_writable(arguments.html)
    for folder in (*filter(None, [arguments.keep_checkpoints]), *arguments.allow_writes):
        output.check_folder(folder)
    try:
        result = _api.dryrun(
            script,
            given,
            device=targets.device_of(arguments),
            module=arguments.module is not None,
            count=arguments.count,
            steps=arguments.steps,
            options=DryRunOptions(
                scan=arguments.scan or 0,
                checkpoint_folder=arguments.keep_checkpoints,
                writable=arguments.allow_writes,
                quiet_output=arguments.json,
            ),
        )
    except Interrupted as interrupted:
        _report(interrupted.run, arguments)
        announce("interrupted")
        return EXIT_INTERRUPTED
    _report(result, arguments)
    return result.exit_code_of_command


def _report(result: DryRun, arguments: argparse.Namespace) -> None:
    draws = arguments.html and result.estimate is not None
    output.print_result(result, figures.report, as_json=arguments.json)
    if draws:
        result.report(arguments.html)
    if arguments.html and not arguments.json:
        nothing = f"no page was written to {arguments.html}: the run recorded nothing to draw"
        print(f"\npage written to {arguments.html}" if draws else f"\n{nothing}")

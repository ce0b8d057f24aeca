"""Measures this machine's device, and keeps what was measured: later estimates for it use it.

Examples:
  memfit calibrate
  memfit calibrate --output a10g.json
  memfit estimate train.py:job --device a10g.json

Without --output the result is kept for this user, and every estimate for the device takes it from there. A file can be
taken to another machine, where its path stands for the device.

Exit codes: 0 measured, 2 bad usage or input
"""

import argparse

from memfit.api import devices
from memfit.api import verify as _api
from memfit.commands import output, verify
from memfit.commands.targets import check_one_device
from memfit.core.errors import BadInput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    verify.add_shared_arguments(parser)
    parser.add_argument("--output", "-O", metavar="FILE", help="write a file, NAME.json, instead of keeping it here")


def run(arguments: argparse.Namespace) -> int:
    """Measures, keeps and reports."""
    check_one_device(arguments, "calibrate")
    if arguments.output:
        if not arguments.output.endswith(".json"):
            raise BadInput(f"a calibration is a file NAME.json, but {arguments.output!r} was given.")
        output.check_writable(arguments.output)
    with output.progress("calibrating", quiet=arguments.json):
        result = _api.calibrate(arguments.device, path=arguments.output, seconds=arguments.seconds)
    code = verify.show(result, as_json=arguments.json)
    if not arguments.json:
        print(f"\nkept in {arguments.output or devices.calibration_path(result.device)}")
    return code

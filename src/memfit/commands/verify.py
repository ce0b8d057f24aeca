"""Predictions beside measurements on this machine: a dozen small training steps, and the device itself.

Examples:
  memfit verify
  memfit verify --device cpu --seconds 60
  memfit verify --device t4 --rehearse

Takes about two minutes. `memfit calibrate` does the same and keeps what was measured for later estimates. With
--rehearse everything is run on the simulated device: nothing is measured, and it need not be there.

Exit codes: 0 measured, 2 bad usage or input
"""

import argparse

from memfit.api import verify as _api
from memfit.commands import EXIT_FITS, output
from memfit.commands.targets import add_device_argument, check_one_device
from memfit.core.verification import Verification
from memfit.reports.verify import figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add_shared_arguments(parser)
    parser.add_argument("--rehearse", action="store_true", help="run it all on the simulated device; measure nothing")


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of everything that measures the device in hand."""
    add_device_argument(parser, "this machine's GPU by default; or cpu", in_hand=True)
    parser.add_argument("--seconds", type=float, default=_api.SECONDS, metavar="N", help="about how long it may take")
    parser.add_argument("--json", action="store_true", help="write JSON to standard output")


def run(arguments: argparse.Namespace) -> int:
    """Measures and reports."""
    check_one_device(arguments, "verify")
    with output.progress("verifying", quiet=arguments.json):
        result = _api.verify(arguments.device, seconds=arguments.seconds, rehearse=arguments.rehearse)
    return show(result, as_json=arguments.json)


def show(result: Verification, *, as_json: bool) -> int:
    """Writes the answer."""
    if as_json:
        output.print_json(result.to_json())
    else:
        output.print_report(figures.report(result))
    return EXIT_FITS

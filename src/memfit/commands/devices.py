"""The catalogue of devices: usable memory, compute capability, bandwidth, rates.

Examples:
  memfit devices
  memfit devices a100
  memfit devices rtx-3090 --stack torch1.12-cu113
  memfit devices --json

Exit codes: 0 listed, 2 no such device or stack
"""

import argparse
from dataclasses import asdict

from memfit.catalogue import find_device, list_devices
from memfit.commands import EXIT_FITS, output
from memfit.core.errors import BadInput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="one device; all of them by default")
    parser.add_argument("--stack", metavar="NAME", help="versions that run on it, such as torch2.4-cu124")
    parser.add_argument("--json", action="store_true", help="write JSON to standard output")


def run(arguments: argparse.Namespace) -> int:
    """Lists all devices or one."""
    if arguments.stack and not arguments.name:
        raise BadInput("--stack is for one device. Name it: memfit devices rtx-3090 --stack torch2.4-cu124")
    devices = [find_device(arguments.name, stack=arguments.stack)] if arguments.name else list(list_devices())
    if arguments.json:
        output.print_json([asdict(device) for device in devices])
    else:
        from memfit.reports.terminal import render_devices

        output.show(render_devices(devices))
    return EXIT_FITS

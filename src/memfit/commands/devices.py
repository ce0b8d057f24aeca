"""The catalogue of devices: usable memory, compute capability, bandwidth, rates.

Examples:
  memfit devices
  memfit devices a100
  memfit devices --json

Exit codes: 0 listed, 2 no such device
"""

import argparse
from dataclasses import asdict

from memfit.catalogue import find_device, list_devices
from memfit.commands import EXIT_FITS, output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="one device; all of them by default")
    parser.add_argument("--json", action="store_true", help="write JSON to standard output")


def run(arguments: argparse.Namespace) -> int:
    """Lists all devices or one."""
    devices = [find_device(arguments.name)] if arguments.name else list(list_devices())
    if arguments.json:
        output.print_json([asdict(device) for device in devices])
    else:
        from memfit.reports.terminal import render_devices

        output.show(render_devices(devices))
    return EXIT_FITS

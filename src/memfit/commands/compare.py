"""Several models side by side, on one device or several.

Examples:
  memfit compare timm:resnet50 timm:mobilenetv3_large_100 timm:efficientnet_b0 -b 64 --device t4
  memfit compare hf:bert hf:distilbert --sequence-length 256 --device rtx-3060 --json

Exit codes: 0 all fit, 3 at least one does not, 2 bad usage or input
"""

import argparse

from memfit.api import estimate as _api
from memfit.api.devices import resolve
from memfit.commands import EXIT_DOES_NOT_FIT, EXIT_FITS, output, targets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("targets", metavar="TARGET", nargs="+", help="as for `memfit estimate`")
    targets.add_job_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Estimates each and shows them in one table."""
    devices = [resolve(name) for name in arguments.devices or [None]]
    results = []
    for target in arguments.targets:
        with output.progress(f"tracing {target}", quiet=arguments.json):
            job = targets.load_job(target, arguments)
            for device in devices:
                results.append(_api.estimate(job, device=device, batch_size=arguments.batch_size))
    if arguments.json:
        output.print_json([result.to_json() for result in results])
    else:
        output.print_comparison(results)
    return EXIT_DOES_NOT_FIT if any(result.fits is False for result in results) else EXIT_FITS

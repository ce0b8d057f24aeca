"""Several models side by side, on one device or several.

Examples:
  memfit compare timm:resnet50 timm:mobilenetv3_large_100 timm:efficientnet_b0 -b 64 --device t4
  memfit compare hf:bert hf:distilbert --sequence-length 256 --device rtx-3060 --json

Exit codes: 0 all fit, 3 at least one does not, 2 bad usage or input
"""

import argparse

from memfit.api import estimate as _api
from memfit.commands import EXIT_DOES_NOT_FIT, EXIT_FITS, output, targets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("targets", metavar="TARGET", nargs="+", help="as for `memfit estimate`")
    targets.add_job_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Estimates each and shows them in one table."""
    results = []
    for target in arguments.targets:
        with targets.opened(target, arguments) as (job, devices):
            results += [_api.estimate(job, device=device, batch_size=arguments.batch_size) for device in devices]
    if arguments.json:
        output.print_json([result.to_json() for result in results])
    else:
        from memfit.reports.terminal import render_comparison

        output.show(render_comparison(results))
    return EXIT_DOES_NOT_FIT if any(result.fits is False for result in results) else EXIT_FITS

"""The largest batch that is safe on a device, and the largest that fits.

Examples:
  memfit max-batch timm:resnet50 --device t4 --precision amp-fp16
  memfit max-batch train.py:job --device rtx-4090 --candidates 16,32,48,64

Exit codes: 0 found, 3 not even one sample fits, 2 bad usage or input
"""

import argparse

from memfit import _api
from memfit.commands import EXIT_DOES_NOT_FIT, EXIT_FITS, output, targets
from memfit.core.errors import BadInput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("target", metavar="TARGET", help=targets.FORMS)
    targets.add_job_arguments(parser, of_one_size=False)
    parser.add_argument("--candidates", metavar="N,N,...", help="sizes to choose from; every whole number by default")


def run(arguments: argparse.Namespace) -> int:
    """Searches and reports."""
    candidates = _parse_candidates(arguments.candidates)
    with output.progress(f"tracing {arguments.target}", quiet=arguments.json):
        job = targets.load_job(arguments.target, arguments)
        found = _api.max_batch(job, device=arguments.device, candidates=candidates)
    if arguments.json:
        rows = [{"batch_size": n, "peak_bytes": peak, "fits": fits} for n, peak, fits in found.tried]
        device = found.estimate.device.name
        output.print_json({"batch_size": found.batch_size, "limit": found.limit, "device": device, "tried": rows})
    else:
        output.print_max_batch(found.tried, found.batch_size, found.limit, found.estimate.device)
        for note in found.estimate.notes if found.limit is not None else ():
            print(f"note: {note.text}")
    return EXIT_FITS if found.limit is not None else EXIT_DOES_NOT_FIT


def _parse_candidates(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise BadInput(
            f"--candidates takes whole numbers from 1 up, separated by commas, such as 16,32,64; {text!r} was given."
        )
    return sizes

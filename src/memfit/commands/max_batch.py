"""The largest batch that surely fits on a device, and the largest at best.

Examples:
  memfit max-batch timm:resnet50 --device t4 --precision amp-fp16
  memfit max-batch train.py:job --device rtx-4090 --candidates 16,32,48,64
  memfit max-batch train.py:job --device t4,a10g,rtx-3090

Exit codes: 0 found, 3 not even one sample fits (of several devices: on one of them), 2 bad usage or input
"""

import argparse

from memfit.api import max_batch as _api
from memfit.commands import EXIT_DOES_NOT_FIT, EXIT_FITS, output, targets
from memfit.core.errors import BadInput
from memfit.core.printing import printable
from memfit.reports.estimate import tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("target", metavar="TARGET", help=targets.FORMS)
    targets.add_job_arguments(parser, of_one_size=False)
    parser.add_argument("--candidates", metavar="N,N,...", help="sizes to choose from; every whole number by default")


def run(arguments: argparse.Namespace) -> int:
    """Searches and reports."""
    candidates = _parse_candidates(arguments.candidates)
    with targets.opened(arguments.target, arguments) as (job, devices):
        results = [_api.max_batch(job, device=device, candidates=candidates) for device in devices]
    if arguments.json:
        data = [
            {
                "batch_size": result.batch_size,
                "limit": result.limit,
                "device": result.estimate.device.name,
                "tried": [{"batch_size": n, "peak_bytes": peak, "fits": fits} for n, peak, fits in result.tried],
            }
            for result in results
        ]
        output.print_json(data[0] if len(data) == 1 else data)
    elif len(results) > 1:
        subject = results[0].estimate.subject
        sizes = [(result.batch_size, result.limit, result.estimate) for result in results]
        output.print_report(tables.batches(subject, sizes))
    else:
        (result,) = results
        estimate = result.estimate
        output.print_report(
            tables.tried_batches(result.tried, result.batch_size, result.limit, estimate.device, estimate)
        )
        for note in result.estimate.notes if result.limit is not None else ():
            print(f"note: {printable(note.text)}")
    return EXIT_DOES_NOT_FIT if any(result.limit is None for result in results) else EXIT_FITS


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

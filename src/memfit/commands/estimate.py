"""Peak memory of a training step on a device that is not there.

Examples:
  memfit estimate timm:resnet50 --batch-size 64 --device rtx-3090 --precision amp-fp16
  memfit estimate hf:gpt2-medium -b 8 --sequence-length 1024 -d a100-40gb --html memory.html
  memfit estimate train.py:job --device 24GiB --json > estimate.json
  memfit estimate timm:resnet50 -b 64 --device t4,a10g,rtx-3090

TARGET is FILE.py:function (the function returns a memfit.Job), timm:NAME, torchvision:NAME, keras:NAME (of
keras.applications, on the backend that KERAS_BACKEND names), or hf: with a model of the Hugging Face Hub, a class of
transformers, a model type or the path of a config.json. Nothing is downloaded.

Exit codes: 0 fits, 3 does not fit (of several devices: on one of them), 2 bad usage or input
"""

import argparse

from memfit.api import estimate as _api
from memfit.commands import EXIT_DOES_NOT_FIT, EXIT_FITS, output, targets
from memfit.reports.estimate import tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("target", metavar="TARGET", help=targets.FORMS)
    targets.add_job_arguments(parser)
    parser.add_argument("--html", metavar="FILE", help="write a self-contained page")


def run(arguments: argparse.Namespace) -> int:
    """Estimates, reports, and says by its exit code whether it fits."""
    if arguments.html:
        targets.check_one_device(arguments, "--html")
        output.check_writable(arguments.html)
    with targets.opened(arguments.target, arguments) as (job, devices):
        results = [_api.estimate(job, device=device, batch_size=arguments.batch_size) for device in devices]
    if arguments.html:
        results[0].report(arguments.html)
    if arguments.json:
        documents = [result.to_json() for result in results]
        output.print_json(documents if len(results) > 1 else documents[0])
    elif len(results) > 1:
        output.print_report(tables.estimates(results))
    else:
        from memfit.reports.terminal import render_estimate

        output.show(render_estimate(results[0]))
        if arguments.html:
            print(f"\npage written to {arguments.html}")
    return EXIT_DOES_NOT_FIT if any(result.fits is False for result in results) else EXIT_FITS

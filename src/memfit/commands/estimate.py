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

from memfit import _api, _estimator
from memfit.commands import EXIT_DOES_NOT_FIT, EXIT_FITS, output, targets
from memfit.core.estimate import Estimate
from memfit.reports import device_tables


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
    with output.progress(f"tracing {arguments.target}", quiet=arguments.json):
        job = targets.load_job(arguments.target, arguments)
        # A name that is wrong is refused before the first trace.
        devices = [_estimator.resolve(name) for name in arguments.devices or [None]]
        results = [_api.estimate(job, device=device, batch_size=arguments.batch_size) for device in devices]
    if len(results) > 1:
        return _report_several(results, arguments)
    (result,) = results
    if arguments.html:
        result.report(arguments.html)
    if arguments.json:
        output.print_json(result.to_json())
    else:
        output.print_estimate(result)
        if arguments.html:
            print(f"\npage written to {arguments.html}")
    return EXIT_DOES_NOT_FIT if result.fits is False else EXIT_FITS


def _report_several(results: list[Estimate], arguments: argparse.Namespace) -> int:
    fit = all(result.fits is not False for result in results)
    if arguments.json:
        output.print_json([result.to_json() for result in results])
    else:
        output.print_devices_table(device_tables.estimates(results), fits=fit)
    return EXIT_FITS if fit else EXIT_DOES_NOT_FIT

"""The fastest way to run a training step within a budget of memory.

Examples:
  memfit plan timm:resnet50 --batch-size 256 --device t4 --precision auto
  memfit plan train.py:job --device rtx-3090 --budget 20GiB --html plan.html --save plan.json
  memfit plan hf:GPT2LMHeadModel -b 32 --sequence-length 1024 -d rtx-3090 --allow exact,rounding,8-bit-optimizer
  memfit plan train.py:job --device 8GiB --code > step.py
  memfit plan --device a100-40gb --script train.py --batch-size 64
  memfit plan --device a100-40gb --script -m my_package.train --batch-size 64
  memfit plan train.py:job --device t4,a10g,rtx-3090

TARGET is as for `memfit estimate`. Everything after --script belongs to the script, so it comes last; the script runs
as in `memfit dryrun`, and what it prints goes to standard error.

Exit codes: 0 a plan that fits, 3 nothing that is allowed fits (of several devices: on one of them), 2 bad usage or
input, 130 interrupted; with --script also 4 and 5, as for `memfit dryrun`
"""

import argparse
from dataclasses import asdict
from typing import Any

import memfit
from memfit.api.devices import resolve
from memfit.commands import EXIT_DOES_NOT_FIT, EXIT_FITS, output, targets
from memfit.core.device import Device
from memfit.core.errors import BadInput
from memfit.core.plan import Plan, PlanNotFound
from memfit.core.progress import announce
from memfit.reports.estimate import tables
from memfit.reports.plan import figures

_FOR_TARGETS = ("batch_size", "optimizer", "sequence_length", "image_size", "keep_outputs", "compile")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    # The script's own options must not be taken for short forms of ours.
    parser.allow_abbrev = False
    parser.usage = "memfit plan TARGET [OPTIONS] | memfit plan [OPTIONS] --script SCRIPT ARGS..."
    parser.add_argument("target", metavar="TARGET", nargs="?", help=targets.FORMS)
    # What follows `--` in the arguments of a script ends up here.
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    targets.add_job_arguments(parser, of_plan=True)
    parser.add_argument("--budget", metavar="SIZE", help="memory the step may use, such as 10GiB; default: all of it")
    parser.add_argument(
        "--allow",
        metavar="WORDS",
        default="exact,rounding",
        help="how far results may differ (exact: identical; rounding: the same up to floating-point rounding; changes: "
        "training changes), names of moves such as lora, approximate for micro-batches despite batch norm; "
        "-NAME leaves one out; default exact,rounding",
    )
    parser.add_argument("--count", type=int, default=1, metavar="N", help="devices to shard over; default 1")
    parser.add_argument(
        "--no-measure", action="store_true", help="don't time real steps, even on the device that is planned for"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help="time to look for a faster plan once one fits; default: until none is expected",
    )
    parser.add_argument("--save", metavar="FILE", help="write the plan as JSON, for memfit.load_plan")
    parser.add_argument("--html", metavar="FILE", help="write a self-contained page")
    parser.add_argument("--code", action="store_true", help="print only the code that does the same without memfit")
    parser.add_argument(
        "--script",
        action=_Script,
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="plan for a script, or for -m MODULE, as `memfit dryrun` runs it",
    )


class _Script(argparse.Action):
    """Stores the script, and the TARGET that stood before it: what follows `--` behind it ends up as one as well."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *option_string: str | None
    ) -> None:
        namespace.script = values
        namespace.target_before_script = namespace.target


def run(arguments: argparse.Namespace) -> int:
    """Plans, reports, and says by its exit code whether anything fits."""
    _check(arguments)
    if len(arguments.devices) > 1:
        return _plan_for_several(arguments)
    try:
        plan = _planned(arguments, targets.device_of(arguments))
    except PlanNotFound as error:
        return _report_smallest(error, arguments)
    if arguments.save:
        plan.save(arguments.save)
    if arguments.html:
        plan.report(arguments.html)
    if arguments.json:
        output.print_json(plan.to_json())
    elif arguments.code:
        print(plan.code(), end="")
    else:
        output.print_report(figures.report(plan))
        for what, path in (("plan", arguments.save), ("page", arguments.html)):
            if path:
                print(f"\n{what} written to {path}")
    return EXIT_FITS


def _check(arguments: argparse.Namespace) -> None:
    """Refuses what can't be, before any time is spent."""
    if arguments.script is None and arguments.target is None:
        raise BadInput("there is nothing to plan: give a TARGET such as timm:resnet50, or --script and a script.")
    if arguments.script is None and arguments.rest:
        raise BadInput(f"one TARGET is planned at a time, but {arguments.rest[0]!r} was given as well.")
    if arguments.json and arguments.code:
        raise BadInput("--json and --code both write to standard output. Give one of them.")
    targets.check_at_least(arguments, count=1)
    for path in filter(None, (arguments.save, arguments.html)):
        output.check_writable(path)


def _plan_for_several(arguments: argparse.Namespace) -> int:
    """A plan for each of several devices, in one table."""
    for option in ("script", "save", "html", "code"):
        if getattr(arguments, option):
            targets.check_one_device(arguments, f"--{option}")
    plans: list[tuple[Device, Plan | PlanNotFound]] = []
    for device in [resolve(name, arguments.stack) for name in arguments.devices]:
        try:
            plans.append((device, _planned(arguments, device)))
        except PlanNotFound as error:
            plans.append((device, error))
    if arguments.json:
        output.print_json(
            [plan.to_json() if isinstance(plan, Plan) else _smallest_as_json(plan, device) for device, plan in plans]
        )
    else:
        output.print_report(tables.plans(plans))
    return EXIT_FITS if all(isinstance(plan, Plan) for _, plan in plans) else EXIT_DOES_NOT_FIT


def _planned(arguments: argparse.Namespace, device: str | Device | None) -> Plan:
    common: dict[str, Any] = {
        "device": device,
        "budget": arguments.budget,
        "precision": arguments.precision or "keep",
        "allow": [word.strip() for word in arguments.allow.split(",")],
        "count": arguments.count,
    }
    if arguments.script is not None:
        script, given, module = _script(arguments)
        rare = memfit.PlanOptions(seconds=arguments.seconds, quiet_output=True)
        return memfit.plan_script(script, given, module=module, options=rare, **common)
    with output.progress(f"planning {arguments.target}", quiet=arguments.json):
        job = targets.load_job(arguments.target, arguments)
        measure = False if arguments.no_measure else None
        rare = memfit.PlanOptions(arguments.batch_size, measure, arguments.seconds)
        return memfit.plan(job, options=rare, **common)


def _script(arguments: argparse.Namespace) -> tuple[str, list[str], bool]:
    """The script or module, what it is given, and whether it is a module."""
    if not arguments.script:
        raise BadInput("--script takes the path of a script, such as --script train.py, but none was given.")
    for option in _FOR_TARGETS:
        if getattr(arguments, option) is not None:
            raise BadInput(
                f"--{option.replace('_', '-')} is for a TARGET; a script has its own. "
                "Pass it to the script, after its name."
            )
    if arguments.target_before_script is not None:
        name = arguments.script[0]
        raise BadInput(
            f"either a TARGET or a script is planned, but {arguments.target_before_script!r} and --script {name} were "
            "given. Leave out one of them; arguments of the script come after its name."
        )
    # argparse leaves what follows `--` to the positional arguments.
    rest = [] if arguments.target is None else ["--", arguments.target, *arguments.rest]
    if arguments.device is None and arguments.budget is None:
        targets.check_device_before_script(arguments.script, "memfit plan --device a100-40gb --script train.py ...")
    return targets.program_of([*arguments.script, *rest])


def _report_smallest(error: PlanNotFound, arguments: argparse.Namespace) -> int:
    """Says what there is to say where nothing fits."""
    smallest = error.smallest
    quiet = arguments.json or arguments.code
    if smallest is not None and arguments.html:
        smallest.report(arguments.html)
        if not quiet:
            print(f"page of the smallest plan written to {arguments.html}")
    for option, path in (("--html", None if smallest is not None else arguments.html), ("--save", arguments.save)):
        if path:
            announce(f"nothing is written to {path} ({option}), because no plan fits")
    return output.print_error(error, error.exit_code, as_json=arguments.json, answer=_smallest_as_json(error))


def _smallest_as_json(error: PlanNotFound, device: Device | None = None) -> dict[str, Any]:
    """The plan that comes nearest, or what else is known of a device that nothing fits on."""
    known = {"fits": False} if device is None else {"fits": False, "device": asdict(device)}
    smallest = known if error.smallest is None else error.smallest.to_json()
    return {**smallest, "message": str(error), "device_that_would_do": error.device_name or None}

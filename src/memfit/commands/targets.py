"""What a command runs on: a function in a file, a model name, or a script with its arguments."""

import argparse
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

from memfit.api.devices import resolve
from memfit.api.jobs import mend_torchvision, named_optimizer
from memfit.api.named_job import named_job
from memfit.commands import output
from memfit.commands.parser import suggestion
from memfit.core.device import Device
from memfit.core.errors import BadInput, BadTarget
from memfit.core.job import OPTIMIZERS, PRECISIONS, Job, read_precision
from memfit.core.progress import announce

PREFIXES = ("timm", "torchvision", "hf", "keras")
PLANNED = ("keep", "auto")
"""Values of --precision that only `memfit plan` takes."""

FORMS = "FILE.py:function, timm:NAME, torchvision:NAME, keras:NAME or hf:NAME_OR_CONFIG"
"""What a target may look like."""


def add_job_arguments(parser: argparse.ArgumentParser, *, of_one_size: bool = True, of_plan: bool = False) -> None:
    """Arguments that say how the step is run.

    Args:
        parser: of the command.
        of_one_size: not a search for the size of the batch.
        of_plan: those of a plan, which is for training and may choose the precision.
    """
    add_device_argument(parser, "a device (`memfit devices`), cpu, or a size such as 24GiB; several: t4,a10g")
    if of_one_size:
        options = ["--batch-size", "-b", *(["--effective-batch"] if of_plan else [])]
        step = "update" if of_plan else "step"
        samples = f"samples per {step}; the job's own by default, 8 for named models"
        parser.add_argument(*options, dest="batch_size", type=int, metavar="N", help=samples)
    precisions = (*(PLANNED if of_plan else ()), *PRECISIONS)
    precision = f"{', '.join(precisions)}; the job's own by default"
    parser.add_argument("--precision", "-p", type=read_precision, choices=precisions, metavar="NAME", help=precision)
    optimizer = f"{', '.join(OPTIMIZERS)}; the job's own by default, adamw for named models"
    parser.add_argument("--optimizer", "-o", type=_as_name, choices=OPTIMIZERS, metavar="NAME", help=optimizer)
    if not of_plan:
        parser.add_argument("--inference", action="store_true", help="a forward pass without gradients")
    parser.add_argument("--sequence-length", type=int, metavar="N", help="tokens per sample, for hf: models")
    parser.add_argument("--image-size", type=int, metavar="N", help="height and width, for vision models")
    kept = "the loop holds the model's outputs until it has the next"
    parser.add_argument("--keep-outputs", action="store_true", default=None, help=kept)
    parser.add_argument("--compile", action="store_true", default=None, help="torch.compile compiles the model")
    if not of_plan:
        buckets = "devices of DistributedDataParallel, which copies gradients into buckets"
        parser.add_argument("--ddp", type=int, metavar="N", help=buckets)
    if of_one_size and not of_plan:
        parser.add_argument("--workers", type=int, metavar="N", help="data loader processes, for the host's memory")
    parser.add_argument("--json", action="store_true", help="write JSON to standard output")


def add_device_argument(parser: argparse.ArgumentParser, text: str, *, in_hand: bool = False) -> None:
    """The option that names devices: `arguments.devices` are all, `arguments.device` is the first.

    Args:
        parser: of the command.
        text: what a device may be.
        in_hand: whether what is installed runs on it, and nothing else can.
    """
    parser.add_argument("--device", "-d", action=_Devices, metavar="NAME", help=text)
    if not in_hand:
        stack = "versions to assume, such as torch2.4-cu124; default: installed"
        parser.add_argument("--stack", metavar="NAME", help=stack)
    parser.set_defaults(devices=[])


class _Devices(argparse.Action):
    """Collects devices, given one after the other or with commas between."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *option_string: str | None
    ) -> None:
        names = [name.strip() for name in str(values).split(",")]
        if not all(names):
            raise argparse.ArgumentError(self, f"a name is missing in {values!r}. Write t4, or several: t4,a10g")
        # A list of its own: that of the defaults would be shared by all commands of the process.
        namespace.devices = list(dict.fromkeys([*namespace.devices, *names]))
        namespace.device = namespace.devices[0]


def check_one_device(arguments: argparse.Namespace, what: str) -> None:
    """Refuses several devices where `what` is about one."""
    if len(arguments.devices) > 1:
        raise BadInput(f"{what} is for one device, but {', '.join(arguments.devices)} were given. Name one at a time.")


def check_at_least(arguments: argparse.Namespace, **least: int) -> None:
    """Refuses numbers below the least that an option takes; options that are missing are fine."""
    for option, smallest in least.items():
        value = getattr(arguments, option, None)
        if value is not None and value < smallest:
            raise BadInput(f"--{option.replace('_', '-')} must be at least {smallest}, but {value} was given.")


def check_device_before_script(script_arguments: Sequence[str], command: str) -> None:
    """Refuses a device that was named after the script, where no other is known."""
    if {"-d", "--device"} & set(script_arguments):
        raise BadInput(f"--device came after the script, so it was passed to the script. Write it before: {command}")


def _as_name(given: str) -> str:
    """A name as memfit writes it: "SGD_momentum" is "sgd-momentum"."""
    return given.strip().lower().replace("_", "-")


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the result goes, and what names a script or module and gives it the rest of the line."""
    parser.add_argument("--json", action="store_true", help="write JSON to standard output, all else to standard error")
    parser.add_argument("--html", metavar="FILE", help="write a self-contained page")
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module, as `python -m` does"
    )
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="the script")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="arguments of the script")


def program_of(words: Sequence[str]) -> tuple[str, list[str], bool]:
    """The script or module that the rest of a line names, what it is given, and whether it is a module."""
    name, *given = words
    if name != "-m":
        return name, given, False
    if not given:
        raise BadInput("-m takes the name of a module, such as -m my_package.train, but none was given.")
    return given[0], given[1:], True


def script_of(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """The script or module, and what it is given."""
    if arguments.module is None:
        if arguments.script is None:
            raise BadInput("there is nothing to run: give the path of a script, or -m and the name of a module.")
        return arguments.script, arguments.arguments
    # argparse leaves what follows `--` to the positional arguments.
    rest = [] if arguments.script is None else ["--", arguments.script, *arguments.arguments]
    name, given, _ = program_of(["-m", *arguments.module])
    return name, [*given, *rest]


@contextmanager
def opened(target: str, arguments: argparse.Namespace) -> Iterator[tuple[Job, list[Device]]]:
    """The job and the devices that the options name, and what is shown while they are worked on."""
    with output.progress(f"tracing {target}", quiet=arguments.json):
        # A name that is wrong is refused before a model is built; this machine's own device is looked for after that.
        devices = [resolve(name, arguments.stack) for name in arguments.devices]
        job = load_job(target, arguments)
        yield job, devices or [resolve(None, arguments.stack)]


def device_of(arguments: argparse.Namespace) -> str | Device | None:
    """The device that the options name, with the stack on it; None where neither is named."""
    if arguments.stack is None:
        device: str | None = arguments.device
        return device
    budget = getattr(arguments, "budget", None)
    return resolve(arguments.device or budget, arguments.stack)


def load_job(target: str, arguments: argparse.Namespace) -> Job:
    """The job that `target` and the options describe."""
    check_at_least(arguments, batch_size=1, sequence_length=1, image_size=1, workers=0, ddp=1)
    if target.partition(":")[0] in PREFIXES:
        job = named_job(
            target,
            optimizer=arguments.optimizer or "adamw",
            sequence_length=arguments.sequence_length,
            image_size=arguments.image_size,
        )
    else:
        job = _from_file(target)
        for option, value in (("sequence-length", arguments.sequence_length), ("image-size", arguments.image_size)):
            if value is not None:
                announce(f"--{option} is for named models; {target} makes its own batch")
        if arguments.optimizer is not None:
            job = replace(job, optimizer=named_optimizer(arguments.optimizer))
    changes: dict[str, Any] = {}
    if arguments.precision in PRECISIONS:
        changes["precision"] = arguments.precision
    if getattr(arguments, "inference", False):
        changes["mode"] = "inference"
    if getattr(arguments, "keep_outputs", False):
        changes["keep_outputs"] = True
    if getattr(arguments, "compile", False):
        # A mode that the job names itself stays.
        changes["compile"] = job.compile or True
    if getattr(arguments, "ddp", None) is not None:
        changes["data_parallel"] = arguments.ddp
    if getattr(arguments, "workers", None) is not None:
        changes["num_workers"] = arguments.workers
    return replace(job, **changes)


def _from_file(target: str) -> Job:
    path, _, name = target.rpartition(":")
    if not path or not name:
        as_it_is = " For a script as it is: `memfit dryrun`, `memfit plan --script`." if target.endswith(".py") else ""
        raise BadTarget(f"{target!r} is not a target. Write {FORMS}.{as_it_is}")
    if not os.path.isfile(path):
        raise BadTarget(
            f"there is no file {path!r} in {os.getcwd()!r}. Write FILE.py:function with a path that exists."
        )
    module = _load_module(path)
    function = getattr(module, name, None)
    if function is None:
        known = [key for key, value in vars(module).items() if callable(value) or isinstance(value, Job)]
        raise BadTarget(
            f"{path} has no function {name!r}.{suggestion(name, known)} It must define one that returns a memfit.Job."
        )
    if isinstance(function, Job):
        return function
    if not callable(function):
        raise BadTarget(f"{name!r} in {path} is {type(function).__name__}, not a function that returns a memfit.Job.")
    try:
        job = function()
    except (Exception, SystemExit) as error:
        hint = ". Leave the model on the CPU: memfit moves it" if "CUDA" in str(error) else ""
        raise BadTarget(f"{name}() in {path} failed: {_last_line(error, path)}{hint}") from error
    if not isinstance(job, Job):
        raise BadTarget(
            f"{name}() in {path} returned {type(job).__name__}, not a memfit.Job. "
            "Let it return memfit.Job(model, loss, batch, optimizer=...)."
        )
    return job


def _load_module(path: str) -> ModuleType:
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BadTarget(f"{path} is not a Python file. Write FILE.py:function.")
    module = importlib.util.module_from_spec(spec)
    # As for a script: its folder is importable, and stays so for what it imports later.
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    sys.modules.setdefault(name, module)
    try:
        try:
            spec.loader.exec_module(module)
        except (RuntimeError, ImportError) as error:
            cause: BaseException | None = error
            while cause is not None and "torchvision::" not in str(cause):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            # A torchvision that doesn't match PyTorch's build.
            mend_torchvision()
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise BadTarget(f"{path} can't be loaded: {_last_line(error, path)}") from error
    return module


def _last_line(error: BaseException, path: str) -> str:
    """The error and the line of the user's file where it happened."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if os.path.abspath(f.filename) == os.path.abspath(path)]
    where = f" ({os.path.basename(path)}:{lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"

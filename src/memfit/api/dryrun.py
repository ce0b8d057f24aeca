"""`memfit.dryrun`: an unmodified training script on a device that need not be there."""

import os
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from memfit.allocator import parse_options
from memfit.api.devices import resolve
from memfit.api.jobs import on_installed_stack, require_torch
from memfit.core import env
from memfit.core.device import Device, Kind
from memfit.core.dryrun import DryRun, DryRunOptions, Request
from memfit.core.errors import BadFile
from memfit.core.progress import announce
from memfit.frameworks.torch.stack import installed_stack
from memfit.planner.moves import autocast_of

if TYPE_CHECKING:
    from memfit.processes.sequence import TooLarge

# Trying out suggestions may take twice as long as the dry run did, or this long.
_MIN_TRIAL_SECONDS = 120.0


def dryrun(
    script: str | os.PathLike[str],
    arguments: Iterable[str] = (),
    *,
    device: str | Device | None = None,
    module: bool = False,
    count: int = 1,
    steps: int = 3,
    options: DryRunOptions | None = None,
) -> DryRun:
    """How an unmodified training script fares on a device that need not be there.

    The script runs in a process of its own, in which PyTorch sees the device. What it prints goes where ours goes.

    Args:
        script: path of the script, or dotted name of a module.
        arguments: arguments of the script.
        device: as for `estimate`; a CUDA device.
        module: whether `script` is the name of a module, as for `python -m`.
        count: how many such devices PyTorch sees; the figures are those of one of them.
        steps: optimizer steps after which the script is ended.
        options: a scan of its batches, what becomes of the files that it writes, and where its output goes.
    """
    # Processes are of no use to anyone who doesn't run a script.
    from memfit.processes.entry_point import checked_arguments, find_target, keras_backend, simulated
    from memfit.processes.limits import has_devices
    from memfit.processes.sequence import NeedsPyTorch, dry_run

    options = options or DryRunOptions()
    words = checked_arguments(arguments, count=(count, 1), steps=(steps, 1), scan=(options.scan, 0))
    name = find_target(os.fspath(script), module=module)
    backend = keras_backend(name, module=module)
    target = resolve("cpu" if device is None and backend and not has_devices() else device)
    plain_target = target
    # Keras on PyTorch runs on the simulated device like any other script of PyTorch.
    until_fit = backend != "" and (backend != "torch" or target.kind is not Kind.CUDA)
    if not until_fit:
        simulated(target)
    # Refused here rather than by the script's process.
    parse_options(env.allocator_settings())
    if not until_fit:
        require_torch()
    target = on_installed_stack(target, installed_stack() if backend in ("", "torch") else None, f"Keras on {backend}")
    kept = options.checkpoint_folder
    request = Request(
        name,
        module,
        words,
        target,
        count,
        steps,
        options.scan,
        checkpoint_folder="" if kept is None else os.path.abspath(kept),
        until_fit=until_fit,
        writable=tuple(map(os.path.abspath, options.writable)),
    )
    for folder in request.writable:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise BadFile(
                f"the folder {folder!r}, which the script may write to, can't be made: {error.strerror}. Name another."
            ) from error
    try:
        run, too_large = dry_run(request, quiet_output=options.quiet_output, announce=announce)
    except NeedsPyTorch as reason:
        announce(f"{reason}: it runs once more, on the simulated GPU")
        simulated_target = on_installed_stack(plain_target, installed_stack(), "PyTorch")
        request = replace(request, device=simulated_target, until_fit=False)
        run, too_large = dry_run(request, quiet_output=options.quiet_output, announce=announce)
    return run if run.fits is not False or too_large is None else _advised(run, too_large)


def _advised(run: DryRun, too_large: "TooLarge") -> DryRun:
    """The run with what could be changed about its step, tried on the script itself as far as time allows."""
    from memfit.planner import advise
    from memfit.planner.timeline_moves import Move, Situation
    from memfit.processes.sequence import peak_with

    began = time.perf_counter()
    seconds = max(_MIN_TRIAL_SECONDS, 2 * run.seconds)
    estimate, seen = too_large.estimate, too_large.seen

    def tried(move: Move) -> int | None:
        left = seconds - (time.perf_counter() - began)
        if left <= 0:
            return None
        announce(f"running the script with a change that may help ({move.title}), to see what it needs then")
        assert move.settings is not None
        return peak_with(too_large, move.settings, max(1, run.num_steps), left, accumulates=move.accumulates)

    situation = Situation(
        estimate.timeline,
        run.allocator,
        estimate.num_parameters,
        run.num_devices,
        seen.batch_size,
        seen.autocast,
        seen.fusable,
        autocast_of(estimate.device),
    )
    context_bytes = estimate.context_bytes + estimate.other_bytes
    suggestions = advise(situation, estimate.replay, context_bytes=context_bytes, peak_with=tried)
    return replace(run, advice=suggestions)

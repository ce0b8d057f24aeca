"""`memfit.plan_script`: checks what was asked, and has the planner find a plan for a script as it is."""

import os
import time
from collections.abc import Iterable

from memfit.allocator import parse_options
from memfit.api.devices import resolve, target_within
from memfit.api.jobs import on_installed_stack, require_torch
from memfit.api.plan import NO_OPTIONS, PlanOptions
from memfit.core import env
from memfit.core.device import Device
from memfit.core.dryrun import Request
from memfit.core.errors import BadInput
from memfit.core.plan import Plan
from memfit.frameworks.torch.stack import installed_stack
from memfit.planner.driver import Patience, Planner
from memfit.planner.moves import AUTO, AUTOCAST, DEFAULT_ALLOW, KEEP, SHARD, allowed_moves


def plan_script(
    script: str | os.PathLike[str],
    arguments: Iterable[str] = (),
    *,
    module: bool = False,
    device: str | Device | None = None,
    budget: str | int | None = None,
    count: int = 1,
    precision: str = KEEP,
    allow: Iterable[str] = DEFAULT_ALLOW,
    options: PlanOptions = NO_OPTIONS,
) -> Plan:
    """The fastest known way to run an unmodified training script within a budget of memory.

    Args:
        script: path of the script, or dotted name of a module.
        arguments: arguments of the script.
        module: whether `script` is the name of a module, as for `python -m`.
        device: as for `dryrun`; a CUDA device.
        budget: what the script may take, "10GiB" or bytes; all of the device by default.
        count: how many such devices PyTorch sees.
        precision: "keep", or "auto" to consider autocast; naming "autocast" in `allow` does the same.
        allow: as for `plan`; sharding, which takes a second device, only where it is named.
        options: `seconds`, `script_steps` and `quiet_output`; the others are for steps.

    Raises:
        PlanNotFound: nothing that is allowed fits.
        StepFailed: the script didn't get as far as a step.
    """
    started = time.perf_counter()
    patience = Patience(options.seconds)
    for name, value in (("effective_batch", options.effective_batch), ("measure", options.measure)):
        if value is not None:
            raise BadInput(
                f"{name} is for plans of steps, but {name}={value!r} was given. A script has its own batches."
            )
    if precision not in (KEEP, AUTO):
        raise BadInput(f"precision of a script's plan must be {KEEP!r} or {AUTO!r}, but {precision!r} was given.")
    from memfit.planner.script_space import ScriptSpace
    from memfit.processes.entry_point import checked_arguments, find_target, simulated

    script_arguments = checked_arguments(arguments, count=(count, 1), script_steps=(options.script_steps, 1))
    target = target_within(simulated(target_within(device, budget) if device is None else resolve(device)), budget)
    words = [word.strip() for word in (allow.split(",") if isinstance(allow, str) else allow)]
    allowed = allowed_moves(words)
    if precision == KEEP and AUTOCAST not in words:
        allowed -= {AUTOCAST}
    if SHARD not in words:
        allowed -= {SHARD}
    # Refused here rather than by the script's process.
    parse_options(env.allocator_settings())
    path = find_target(os.fspath(script), module=module)
    require_torch()
    target = on_installed_stack(target, installed_stack(), "the script")
    request = Request(
        path, module, script_arguments, target, count, options.script_steps, unlimited=True, compiles=False, watch=True
    )
    space = ScriptSpace(request, allowed, patience, quiet_output=options.quiet_output)
    return Planner(space.question, space.search, started).run()

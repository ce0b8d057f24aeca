"""`memfit.run`: a training script that goes on when memory runs out."""

import os
from collections.abc import Sequence

from memfit.core.errors import BadFile
from memfit.core.progress import announce
from memfit.core.run_events import RunRequest
from memfit.core.supervised import SupervisedRun
from memfit.core.units import parse_size
from memfit.processes.entry_point import check_budget, checked_arguments, find_target
from memfit.processes.supervise import Supervisor


def run(
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    budget: str | int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    retries: int = 5,
    rescue: bool = False,
    module: bool = False,
    quiet_output: bool = False,
    verbose: bool = False,
) -> SupervisedRun:
    """Runs a script, unmodified, in a process of its own, and starts it again when memory runs out.

    Its input and output are ours. Under the container's limit, or the budget, a request that goes too far fails with
    an exception instead of a kill; a kill by the kernel is noticed and explained. The next
    attempt goes on from the last checkpoint and is told to use less; no two attempts are told the same. A script that
    fails for another reason isn't started again.

    Args:
        script: path of the file, or the name of the module.
        arguments: what it is given.
        budget: memory that it may take, such as "8GiB"; by default all that there is.
        checkpoint: folder for checkpoints of a guard; by default the script's own, if it has one.
        retries: how often it may be started again.
        rescue: rescue operations that run out of memory from the first attempt on.
        module: whether `script` is the name of a module, as for `python -m`.
        quiet_output: what the script prints goes to standard error.
        verbose: show the script's traceback where memory was the reason; else it is kept in a file, and told where.

    Returns:
        How it went: every attempt, why it ended, memory over time. `exit_code` is what `memfit run` returns.
    """
    words = checked_arguments(arguments, retries=(retries, 0))
    budget_bytes = None if budget is None else parse_size(budget)
    name = find_target(os.fspath(script), module=module)
    if budget_bytes is not None:
        check_budget(budget_bytes)
    request = RunRequest(
        script=name,
        module=module,
        arguments=words,
        budget_bytes=budget_bytes,
        checkpoint=None if checkpoint is None else _folder(os.fspath(checkpoint)),
        rescue=rescue,
        verbose=verbose,
    )
    return Supervisor(request, retries=retries, quiet_output=quiet_output, announce=announce).run()


def _folder(path: str) -> str:
    """The full path of a folder that can be written to, which is made where it is missing."""
    try:
        os.makedirs(path, exist_ok=True)
    except FileExistsError:
        raise BadFile(f"{path!r} is not a folder. Give the path of one for checkpoints.") from None
    except OSError as error:
        raise BadFile(f"the folder {path!r} can't be made: {error.strerror}. Name another for checkpoints.") from None
    if not os.access(path, os.W_OK):
        raise BadFile(f"the folder {path!r} can't be written to. Name another for checkpoints.")
    return os.path.abspath(path)

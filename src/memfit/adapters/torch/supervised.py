"""What memfit does in a supervised script when it has imported PyTorch: budget, rescue, and the trainers it knows.

A trainer's library is imported later than PyTorch, or never; so each is equipped when its own module has been imported.
"""

from collections.abc import Callable, Mapping
from types import ModuleType

from memfit.adapters.torch.budget import limit_devices
from memfit.adapters.torch.imports import watch_imports
from memfit.core.run_events import RunRequest, note


def install(request: RunRequest, trainers: Mapping[str, Callable[[ModuleType], None]]) -> None:
    """Equips this process for what the supervisor wants of the attempt.

    Args:
        request: of the attempt.
        trainers: what guards the trainers of a library, by the module that has to be imported first.
    """
    note("torch")
    if request.budget_bytes is not None:
        limit_devices(request.budget_bytes)
    if request.rescue:
        # What nobody asked for isn't loaded.
        from memfit.adapters.torch import rescue

        rescue.enable(eager=request.eager)
        note("rescue", eager=request.eager)
    watch_imports(trainers)

"""What memfit does in a supervised script when it has imported PyTorch: budget, rescue, and the trainers it knows.

A trainer's library is imported later than PyTorch, or never; so each is equipped when its own module has been imported.
"""

from collections.abc import Callable, Mapping
from types import ModuleType

from memfit.core.run_events import RunRequest, note
from memfit.frameworks.torch.oom import limit_devices
from memfit.frameworks.torch.script.imports import watch_imports


def install(request: RunRequest, trainers: Mapping[str, Callable[[ModuleType], None]]) -> None:
    """Equips this process for what the supervisor wants of the attempt."""
    note("torch")
    if request.budget_bytes is not None:
        limit_devices(request.budget_bytes)
    if request.rescue:
        # What nobody asked for isn't loaded.
        from memfit.frameworks.torch.rescue import Rescue

        Rescue(eager=request.eager)
        note("rescue", eager=request.eager)
    watch_imports(trainers)

"""memfit inside the training loops of transformers and Lightning; the libraries are loaded when they are used."""

from typing import TYPE_CHECKING, Any

from memfit.api.integrations import GuardedTrainerMixin, guard_trainer

if TYPE_CHECKING:
    LightningGuard: Any

__all__ = ["GuardedTrainerMixin", "LightningGuard", "guard_trainer"]


def __getattr__(name: str) -> Any:
    if name != "LightningGuard":
        raise AttributeError(f"module 'memfit.integrations' has no attribute {name!r}")
    from memfit.api import integrations

    return integrations.LightningGuard

"""Zero-edit rescue of plain training loops: saved activations move away, and the operation runs again."""

from memfit.frameworks.torch.rescue.session import Rescue

__all__ = ["Rescue"]

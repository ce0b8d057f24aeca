"""Zero-edit rescue of plain training loops: saved activations move away, and the operation runs again."""

from memfit.adapters.torch.rescue.session import Rescue, enable, rescue

__all__ = ["Rescue", "enable", "rescue"]

"""Memory that CPU kernels take for themselves, operator by operator."""

from typing import Any

from memfit.adapters.torch.recorder import Recorder


class HostInternals:
    """What CPU kernels take for themselves.

    Args:
        recorder: receives workspaces that stay.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def table(self) -> dict[str, Any]:
        """Rules by operator name."""
        return {}

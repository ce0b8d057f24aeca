"""Whether this machine has devices: then a budget is theirs, and not that of the script's process."""

from pathlib import Path

from memfit.core import env


def has_devices(folder: Path = Path("/dev")) -> bool:
    """Whether this machine has devices of NVIDIA or AMD that a program may see."""
    if env.visible_cuda_devices() in ("", "-1"):
        return False
    return any(any(folder.glob(pattern)) for pattern in ("nvidia[0-9]*", "kfd", "dxg"))

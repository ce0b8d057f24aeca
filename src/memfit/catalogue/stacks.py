"""Devices with the software that runs on them."""

from dataclasses import replace

from memfit.core.device import Device, Kind
from memfit.core.errors import BadInput
from memfit.core.stack import Stack, Version, builds_of, read_stack, since

# First CUDA version that compiles for devices of a compute capability (release notes of the CUDA toolkit); a device of
# 8.9 runs what was compiled for 8.6. CUDA 13 compiles for 7.5 and above only.
_FIRST_CUDA: dict[Version, Version] = {(0, 0): (0,), (8, 0): (11, 1), (9, 0): (11, 8), (10, 0): (12, 8)}
_LAST_OF_OLD, _FIRST_OF_NEW = (12, 9), (7, 5)


def on_stack(device: Device, stack: str | Stack | None) -> Device:
    """The device with other software than what is installed; None leaves it as it is.

    Raises:
        BadInput: there is no such stack, or it has nothing for this device; the message names the nearest.
    """
    if stack is None:
        return device
    wanted = read_stack(stack)
    if device.kind is Kind.CUDA and device.capability is not None and not _runs(wanted.device_cuda, device.capability):
        others = [cuda for cuda in builds_of(wanted.torch) if _runs(cuda, device.capability)]
        known = f"; this one does: {replace(wanted, cuda=others[0]).text}" if others else "; use another release"
        raise BadInput(
            f"{wanted.described()[0]} has no kernels for {device.title} (compute capability "
            f"{'.'.join(map(str, device.capability))}){known}."
        )
    return replace(device, stack=wanted)


def _runs(cuda: Version, capability: tuple[int, int]) -> bool:
    """Whether a CUDA version has kernels for devices of a compute capability."""
    return cuda >= since(capability, _FIRST_CUDA) and (capability >= _FIRST_OF_NEW or cuda <= _LAST_OF_OLD)

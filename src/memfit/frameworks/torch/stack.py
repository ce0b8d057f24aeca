"""The stack that is installed here. Nothing is imported to find it: reports name it before a framework is loaded."""

import re
from functools import cache

from memfit.core.device import Device
from memfit.core.stack import Stack, Version, default_cuda, read_version


@cache
def installed_stack() -> Stack | None:
    """The versions that are installed; None where PyTorch isn't."""
    written = _written("torch")
    torch = read_version(written)
    if len(torch) < 2:
        return None
    build = written.partition("+")[2]
    digits = re.fullmatch(r"cu(\d+)(\d)", build)
    # A wheel of PyPI doesn't say what it was built for: it is the release's usual one.
    cuda = (int(digits[1]), int(digits[2])) if digits else None if build else default_cuda(torch)
    return Stack(
        torch, cuda, *(_installed(name) for name in ("transformers", "peft", "bitsandbytes")), is_installed=True
    )


def stack_of(device: Device) -> Stack:
    """What runs on a device: what was asked for, or else what is installed."""
    stack = device.stack or installed_stack()
    assert stack is not None, "PyTorch simulates the device"
    return stack


def _installed(package: str) -> Version | None:
    return read_version(_written(package)) or None


def _written(package: str) -> str:
    """The version of a package as it says itself; "" where it isn't installed."""
    # Slow to import, and `import memfit` needs no version.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""

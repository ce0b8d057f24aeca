"""The memory of a device of the catalogue, under the allocator settings that are in force."""

from collections.abc import Callable

from memfit.allocator.live import LiveAllocator
from memfit.allocator.settings import parse_options
from memfit.core import env
from memfit.core.device import Device

Configure = Callable[[Callable[[str], None]], None]


def memory_of(device: Device, *, unlimited: bool = False) -> tuple[LiveAllocator, Configure]:
    """(the memory of `device`, a function that reads the settings anew as long as nothing has been allocated).

    The function takes what to call with a sentence for each setting that isn't simulated, or only roughly.

    Args:
        device: whose memory.
        unlimited: give it no end.
    """
    has_end = not unlimited and device.usable_bytes is not None
    capacity_bytes = max(1, (device.usable_bytes or 0) - (device.context_bytes or 0)) if has_end else None
    memory = LiveAllocator(parse_options(env.allocator_settings()), capacity_bytes)

    def configure(report: Callable[[str], None]) -> None:
        memory.configure(parse_options(env.allocator_settings(), report))

    return memory, configure

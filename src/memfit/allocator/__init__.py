"""What a device must provide for a timeline: exact replays of memory allocators, with no device needed."""

from memfit.allocator.live import LiveAllocator, memory_of
from memfit.allocator.replays import replay, replay_best_fit, replay_plain, replay_variants
from memfit.allocator.settings import parse_options

__all__ = [
    "LiveAllocator",
    "memory_of",
    "parse_options",
    "replay",
    "replay_best_fit",
    "replay_plain",
    "replay_variants",
]

"""What a device must provide for a timeline: exact replays of memory allocators, with no device needed."""

from memfit.allocator.bfc import replay_best_fit
from memfit.allocator.caching import replay
from memfit.allocator.device_memory import memory_of
from memfit.allocator.live import LiveAllocator
from memfit.allocator.plain import replay_plain
from memfit.allocator.settings import parse_options

__all__ = ["LiveAllocator", "memory_of", "parse_options", "replay", "replay_best_fit", "replay_plain"]

"""What a device must provide for a timeline: exact replays of memory allocators, with no device needed."""

from memfit.allocator.caching import replay
from memfit.allocator.plain import replay_plain

__all__ = ["replay", "replay_plain"]

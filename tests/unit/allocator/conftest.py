"""A builder of timelines shared by the tests of the allocator."""

from collections.abc import Callable

import pytest

from memfit.core.timeline import Block, Category, Phase, Timeline

Script = Callable[..., Timeline]


def _timeline_of(*steps: tuple[str, int] | str) -> Timeline:
    sizes: dict[str, int] = {}
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    for tick, step in enumerate(steps):
        if isinstance(step, str):
            ends[step] = tick
        else:
            name, sizes[name] = step
            starts[name] = tick
    blocks = tuple(
        Block(sizes[name], start, ends.get(name), Category.TEMPORARY, Phase.FORWARD) for name, start in starts.items()
    )
    return Timeline(blocks, len(steps))


@pytest.fixture(scope="session")
def script() -> Script:
    """Builds a timeline from steps: ("a", 512) allocates a block named a, "a" frees it."""
    return _timeline_of

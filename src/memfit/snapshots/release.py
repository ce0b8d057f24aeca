"""Which release of PyTorch made a snapshot, as far as its stacks tell.

A snapshot names no version. But nearly every stack goes through `Module._wrapped_call_impl`, and the line at which it
calls on differs from release to release. Those of 2.1, 2.2, 2.6 and 2.11 are in snapshots whose release is known, that
of 2.13 in its wheel; the others are as published tracebacks have them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from memfit.core.stack import Version
from memfit.snapshots.reader import Event

_LINES: Mapping[int, Sequence[Version]] = {
    1518: ((2, 1),),
    1511: ((2, 2),),
    1532: ((2, 3),),
    1553: ((2, 4),),
    1736: ((2, 5),),
    1739: ((2, 6),),
    1751: ((2, 7),),
    1773: ((2, 8),),
    1775: ((2, 9),),
    1776: ((2, 10),),
    1779: ((2, 11),),
    1778: ((2, 12), (2, 13)),
}


def releases_of(events: Sequence[Event]) -> Sequence[Version]:
    """The releases of PyTorch that have the lines of a history's stacks; none where they tell nothing."""
    seen: set[int] = set()
    for event in events:
        frames = event.raw.get("frames")
        # Events of the same stack share its list.
        if id(frames) in seen or not isinstance(frames, list | tuple):
            continue
        seen.add(id(frames))
        for frame in frames:
            if isinstance(frame, dict) and frame.get("name") == "_wrapped_call_impl" and _is_module(frame):
                line = frame.get("line")
                # Compiled modules go on at another line.
                if isinstance(line, int) and line in _LINES:
                    return _LINES[line]
    return ()


def _is_module(frame: Mapping[str, Any]) -> bool:
    path = frame.get("filename")
    return isinstance(path, str) and path.endswith("torch/nn/modules/module.py")

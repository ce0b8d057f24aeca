"""Allocations of a device's history and of a simulation, in one form that both can be compared in.

Where a history has C++ frames, they name the operator (`at::_ops::bmm::call`), the autograd node in which it ran and
the function that asked; Python frames name the line. In the backward pass of a real device there are none of those.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from memfit.core.timeline import Timeline
from memfit.snapshots.reader import ALLOCATED, FREE_COMPLETED, FREE_REQUESTED, Event

# What merely makes room for an operator's output is no operator of its own.
_OPERATOR = re.compile(r"^at::_ops::(?!empty_|new_empty|resize_)(\w+)::(?:call|redispatch)\(")
_NODE = re.compile(r"\b(\w+Backward\d*)(?:_apply_functional|::apply)\(|torch::autograd::(AccumulateGrad)::apply")
# Of functions between the allocator and the operator that say no more than that something was allocated.
_MERELY_ALLOCATES = re.compile(
    r"torch::unwind|CapturedTraceback|gather_with_cpp|^c10::cuda|^c10::Storage|::raw_alloc|empty_generic|empty_cuda"
    r"|empty_strided|_empty|create_out|set_output|TensorIteratorBase|^at::meta|wrap_kernel_functor|wrapper_CUDA|^\?\?$"
    r"|^at::_ops::|^at::empty|^at::detail|BoxedKernel|KernelFunction"
)
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")
# Parts of the interpreter's own path.
_STANDARD = re.compile(r"/lib/python\d[^/]*/|/python\d\.\d+/|^<frozen|importlib")


@dataclass(frozen=True, slots=True)
class Allocation:
    """One block: when it was asked for and returned, and by whom.

    Args:
        size_bytes: what was asked for.
        start: position of the event, or tick, at which it was asked for.
        end: that at which it was returned; None where it was not.
        op: operator, such as "aten.bmm", or "".
        source: innermost line outside of PyTorch, "train.py:31", or "".
        place: autograd node of a real one, or module of a simulated one, or "".
        function: of PyTorch that asked inside the operator, or "" where it is the operator's output or not known.
    """

    size_bytes: int
    start: int
    end: int | None
    op: str = ""
    source: str = ""
    place: str = ""
    function: str = ""


def real_allocations(events: Sequence[Event], known_ops: Iterable[str] = ()) -> list[Allocation]:
    """What a device was asked for, in order; operators get those of the `known_ops` that they are overloads of."""
    ends: dict[int, int] = {}
    live: dict[int, int] = {}
    for position, event in enumerate(events):
        if event.action == ALLOCATED and event.address is not None:
            live[event.address] = position
        elif event.action in (FREE_REQUESTED, FREE_COMPLETED) and event.address is not None:
            start = live.pop(event.address, None)
            if start is not None:
                ends[start] = position
    names = _Names(events, known_ops)
    return [
        Allocation(event.size_bytes, position, ends.get(position), *names.of(event))
        for position, event in enumerate(events)
        if event.action == ALLOCATED
    ]


def simulated_allocations(timeline: Timeline) -> list[Allocation]:
    """The blocks of a timeline, in order."""
    return [
        Allocation(block.size_bytes, block.start, block.end, block.op, block.source, block.module)
        for block in sorted(timeline.blocks, key=lambda block: block.start)
    ]


class _Names:
    """Who asked, by the frames of an event."""

    def __init__(self, events: Sequence[Event], known_ops: Iterable[str]) -> None:
        self._known = {op.removeprefix("aten."): op for op in known_ops}
        self._ops: dict[str, str] = {}
        self._sources: dict[tuple[str, int], str] = {}
        # By stack: events of the same one share its list.
        self._named: dict[int, tuple[str, str, str, str]] = {}
        self._folder = _script_folder(events)

    def of(self, event: Event) -> tuple[str, str, str, str]:
        """(operator, source line, autograd node, function)."""
        frames = event.raw.get("frames")
        if id(frames) not in self._named:
            self._named[id(frames)] = self._read(frames)
        return self._named[id(frames)]

    def _read(self, frames: Any) -> tuple[str, str, str, str]:
        op = source = node = function = ""
        for frame in _plain_frames(frames):
            name, path = frame.get("name"), frame.get("filename")
            if not isinstance(name, str) or not isinstance(path, str):
                continue
            if path.endswith(".py") or path.startswith("<"):
                line = frame.get("line")
                source = self._source(path, line if type(line) is int else 0)
                if source:
                    # Further out there is only what called it.
                    break
                continue
            if not op:
                match = _OPERATOR.match(name)
                if match:
                    op = self._op(match[1])
                elif not function and not _MERELY_ALLOCATES.search(name):
                    function = re.split("[(<]", name)[0].rpartition(" ")[2]
            if not node and ("Backward" in name or "AccumulateGrad" in name):
                match = _NODE.search(name)
                node = match[1] or match[2] if match else ""
        return op, source, node, function if op else ""

    def _op(self, name: str) -> str:
        """`add_Tensor` is an overload of `aten.add`."""
        if name not in self._ops:
            words, known = name.split("_"), ""
            for length in range(len(words), 0, -1):
                known = self._known.get("_".join(words[:length]), "")
                if known:
                    break
            self._ops[name] = known or f"aten.{name}"
        return self._ops[name]

    def _source(self, path: str, line: int) -> str:
        """The line, or "" for one of PyTorch or the interpreter."""
        key = (path, line)
        if key not in self._sources:
            installed = _INSTALLED.match(path)
            name = path[installed.end() :] if installed else path
            is_torch = installed is not None and name.startswith("torch/")
            if is_torch or name.startswith("<frozen") or _STANDARD.search("/" + name):
                self._sources[key] = ""
            else:
                below = self._folder and name.startswith(self._folder + "/")
                short = name if installed else name[len(self._folder) + 1 :] if below else os.path.basename(name)
                self._sources[key] = f"{short}:{line}"
        return self._sources[key]


def _script_folder(events: Sequence[Event]) -> str:
    """Where the program is: paths are shown from there on."""
    stacks = {id(event.raw.get("frames")): event.raw.get("frames") for event in events}
    for frames in stacks.values():
        for frame in reversed(_plain_frames(frames)):
            path = frame.get("filename")
            if frame.get("name") == "<module>" and isinstance(path, str) and path.endswith(".py"):
                return os.path.dirname(path)
    return ""


def _plain_frames(frames: Any) -> list[dict[str, Any]]:
    return [frame for frame in frames if isinstance(frame, dict)] if isinstance(frames, list | tuple) else []

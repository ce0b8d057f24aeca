"""Kernels of compiled graphs: what each reads and writes, in the place of its code.

Inductor's scheduler knows, for every node that is fused into a kernel, which buffers it touches and by which index.
What one node writes and another reads stays in registers, and is no traffic where no other kernel reads it. Everything
else passes through the device's memory once, which is how long such kernels take: also those that sum up.
"""

import itertools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from memfit.core.patching import Replacement
from memfit.frameworks.torch import internals

_PREFIX = "memfit_kernel_"
FUSED = "inductor.fused"
"""What a fused kernel is called among the operators of a step."""


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """A kernel that Inductor made of several operators.

    Args:
        moved_bytes: what it reads and writes.
        written_bytes: what of it is written.
    """

    moved_bytes: int
    written_bytes: int


class Kernels:
    """The kernels of the graph that is being compiled, by the names that its code calls them by."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._made: dict[str, FusedKernel] = {}

    def taken(self) -> dict[str, FusedKernel]:
        """Those made since the last call."""
        made, self._made = self._made, {}
        return made

    def replacements(self) -> Iterable[Replacement]:
        """What stands in for the part of Inductor that names a kernel, and puts its code into that of the graph."""

        def define(scheduling: Any, source: str, nodes: Any, kernel: Any = None, **options: Any) -> str:
            name = f"{_PREFIX}{next(self._numbers)}"
            self._made[name] = kernel_of(nodes, getattr(kernel, "removed_buffers", ()))
            return name

        schedulings = internals.triton_module.TritonScheduling, internals.CppScheduling
        return (Replacement(scheduling, "define_kernel", define) for scheduling in schedulings)


def kernel_of(nodes: Iterable[Any], removed: Iterable[str]) -> FusedKernel:
    """What the kernel of some nodes of the scheduler moves.

    Args:
        nodes: which are fused; marks between them are passed over.
        removed: buffers that are in the kernel alone.
    """
    fused = [node for node in nodes if isinstance(node, internals.SchedulerNode)]
    made = {write.name for node in fused for write in node.read_writes.writes}
    gone = {*removed, *internals.inductor_of_thread.graph.removed_buffers}
    read = _traffic(fused, lambda node: node.read_writes.reads, gone | made)
    written = _traffic(fused, lambda node: node.read_writes.writes, gone)
    return FusedKernel(read + written, written)


def _traffic(nodes: list[Any], accesses: Callable[[Any], Iterable[Any]], left_out: set[str]) -> int:
    """Bytes of the buffers that these nodes access, each part of a buffer once."""
    graph = internals.inductor_of_thread.graph
    sizes: dict[str, int] = {}
    for node in nodes:
        # An index that depends on data touches one element for each that is computed.
        most = prod(_number(size) for sizes in node.get_ranges() for size in sizes)
        for access in accesses(node):
            if access.name not in left_out and isinstance(access, internals.MemoryDependency):
                width = graph.get_dtype(access.name).itemsize
                size = min(access.numbytes_hint(), most * width)
                whole = _number(graph.get_numel(access.name)) * width
                sizes[access.name] = min(whole, sizes.get(access.name, 0) + size)
    return sum(sizes.values())


def _number(size: Any) -> int:
    """A size of the graph, as a limit; one that varies limits nothing."""
    return int(size) if isinstance(size, int) or size.is_number else sys.maxsize

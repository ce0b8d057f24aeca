"""Work of PyTorch's compiler that memory doesn't depend on, left out.

Most of it is the code of kernels. What memory depends on is what a kernel reads and writes: a buffer that is read
nowhere but in the kernel that makes it is never allocated (`Kernel.remove_kernel_local_buffers`), and one whose last
reader writes another of its size becomes that one (`decide_inplace_update`). Inductor learns what is read and written
while it writes the kernel; its scheduler has known it before.

A kernel that goes over its data in several loops must keep what is written in one and read in the next; reductions, and
what is made of their results alone, stay at hand. The few kernels of other kinds are written.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.core.patching import Replacement, around
from memfit.frameworks.torch import internals


def leaves_out(is_on: Callable[[], bool]) -> list[Replacement]:
    """What stands in for parts of the compiler while `is_on`."""
    scheduling = internals.triton_module.TritonScheduling
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (internals.KernelScheduling, "codegen_node_schedule_with_kernel", _note_uses),
        # Reads an environment variable for every pattern at every node.
        (internals.pattern_matcher_module, "_should_debug_node", lambda plain, name: False),
        # For logs, and a cache that isn't used.
        (torch.fx.GraphModule, "print_readable", lambda plain, graph, *arguments, **options: ""),
        (internals.compile_fx_module, "wrap_compiler_debug", _as_it_is),
        (internals.compile_fx_module, "with_fresh_cache_if_config", _fresh_caches),
        (scheduling, "codegen_comment", lambda plain, *arguments, **options: None),
    ]
    # What a release hasn't needn't be left out.
    return [around(owner, name, other, is_on) for owner, name, other in replaced if hasattr(owner, name)]


def _as_it_is(plain: Callable[..., Any], compiler: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A compiler without a copy of each graph that it is given, from which a failure could be repeated."""
    return compiler


@contextmanager
def _fresh_caches(plain: Callable[..., Any]) -> Iterator[None]:
    """Caches in memory are empty before and after, without the folder for compiled kernels that is never removed."""
    internals.clear_compiler_caches()
    try:
        yield
    finally:
        internals.clear_compiler_caches()


def _note_uses(plain: Callable[..., Any], scheduling: Any, schedule: list[Any], kernel: Any) -> Any:
    """Tells a kernel what it reads and writes, as if it had been written."""
    nodes = [entry for entry in schedule if not isinstance(entry, type)]
    if not _is_plain(nodes, kernel):
        return plain(scheduling, schedule, kernel)
    loops = kernel.features.is_reduction() and any(tree.is_loop for tree in kernel.range_trees)
    removed = internals.inductor_of_thread.graph.removed_buffers
    with kernel:
        for node in nodes:
            node.decide_inplace_update()
        # Written so far: at hand in the kernel, at hand until this loop over the data ends, and at hand no more.
        kept: set[str] = set()
        passing: set[str] = set()
        lost: set[str] = set()
        in_loop = loops
        for entry in schedule:
            if isinstance(entry, type):
                # Marks where the loop is left, or where another begins.
                in_loop = loops and entry is internals.EnableReduction
                lost |= passing
                passing.clear()
                continue
            for read in entry.read_writes.reads:
                if isinstance(read, internals.MemoryDependency) and read.name not in kept | passing:
                    kernel.args.input(read.name)
                    if read.name in lost:
                        kernel.must_keep_buffers.add(read.name)
            for write in entry.read_writes.writes:
                (passing if in_loop and not entry.is_reduction() else kept).add(write.name)
                kernel.store_buffer_names.add(write.name)
                if write.name not in removed:
                    kernel.args.output(write.name)
    return None


def _is_plain(nodes: list[Any], kernel: Any) -> bool:
    """Whether a kernel writes each of its results once, and reads nothing else than the scheduler says."""
    usual = (internals.MemoryDependency, internals.WeakDependency)
    return (
        not getattr(kernel, "cooperative_reduction", False)
        # How many partial sums its workspace holds is known when it has been written.
        and not getattr(kernel, "mix_order_reduction", False)
        and all(isinstance(node, internals.SchedulerNode) for node in nodes)
        and all(isinstance(read, usual) for node in nodes for read in node.read_writes.reads)
        # Additions by many threads at a time are no results to be read again.
        and not any(getattr(write, "mode", None) for node in nodes for write in node.read_writes.writes)
    )

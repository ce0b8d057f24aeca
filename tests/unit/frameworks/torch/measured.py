"""What a CPU operator really allocates inside, by PyTorch's profiler, next to what its rule says."""

import gc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from memfit.frameworks.torch.kernels.host_kernels import host_internals

NUM_THREADS = 2

needs_avx512 = pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX512"),
    reason="oneDNN's layouts were measured with AVX-512 instructions, which this machine lacks",
)


def allocations(action) -> list[int]:
    """Changes in bytes, in order, while `action` runs; its result stays alive."""
    # What an earlier profile saw allocated would otherwise be freed in the middle of this one.
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        result = action()
    rows = []

    def walk(events):
        for event in events:
            if event.name == "[memory]":
                rows.append((event.start_time_ns, event.typed[1].alloc_size))
            walk(event.children)

    walk(prof.profiler.kineto_results.experimental_event_tree())
    del result
    return [change for _, change in sorted(rows, key=lambda row: row[0])]


def as_shapes(value):
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)(as_shapes(part) for part in value)
    return value


def internal_bytes(op, *args) -> tuple[int, int]:
    """(measured, predicted) bytes that `op(*args)` takes beside its outputs."""
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    try:
        out = op(*args)
        total = peak = 0
        for change in allocations(lambda: op(*args)):
            total += change
            peak = max(peak, total)
        rule = host_internals().get(op._schema.name)
    finally:
        torch.set_num_threads(before)
    parts = [part for part in (out if isinstance(out, tuple) else (out,)) if part is not None]
    kept = sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}.values())
    predicted = [] if rule is None else rule(as_shapes(args), as_shapes(out))
    return peak - kept, sum(size for size in predicted if size > 0)

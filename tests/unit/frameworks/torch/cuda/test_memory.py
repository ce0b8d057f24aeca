from dataclasses import replace

import pytest
import torch
from torch.cuda.memory import memory_allocated as memory_allocated_imported_before

from memfit.allocator import LiveAllocator
from memfit.core.replay import AllocatorOptions
from memfit.core.units import GIB, MIB
from memfit.frameworks.torch.cuda.memory import MEMORY_HISTORY, MEMORY_POOL, format_bytes, out_of_memory_message
from tests.unit.frameworks.torch.machines import T4, machine


def test_allocated_and_reserved_are_those_of_the_allocator():
    with machine() as found:
        block = found.memory.malloc(3 * MIB)
        assert torch.cuda.memory_allocated() == memory_allocated_imported_before("cuda") == 3 * MIB
        assert torch.cuda.memory_reserved(0) == 20 * MIB
        found.memory.free(block)

        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.max_memory_allocated() == 3 * MIB
        assert torch.cuda.max_memory_reserved(torch.device("cuda", 0)) == 20 * MIB
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0


def test_the_accelerator_shows_the_same():
    with machine() as found:
        found.memory.free(found.memory.malloc(3 * MIB))
        assert torch.accelerator.memory_allocated() == 0
        assert torch.accelerator.max_memory_allocated() == 3 * MIB
        assert torch.accelerator.memory_reserved() == torch.accelerator.max_memory_reserved() == 20 * MIB
        assert torch.accelerator.memory_stats() == torch.cuda.memory_stats()
        assert torch.accelerator.get_memory_info() == torch.cuda.mem_get_info()
        torch.accelerator.reset_peak_memory_stats()
        torch.accelerator.reset_accumulated_memory_stats()
        torch.accelerator.empty_cache()
        torch.accelerator.empty_host_cache()

        assert torch.cuda.max_memory_allocated() == torch.cuda.memory_reserved() == 0
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0


def test_old_names_still_work():
    with machine() as found:
        found.memory.malloc(3 * MIB)
        with pytest.warns(FutureWarning, match="renamed"):
            assert torch.cuda.memory_cached() == 20 * MIB
        with pytest.warns(FutureWarning, match="renamed"):
            assert torch.cuda.max_memory_cached() == 20 * MIB
        with pytest.warns(FutureWarning, match="reset_peak_memory_stats"):
            torch.cuda.reset_max_memory_allocated()


def test_statistics_are_flat_and_nested():
    with machine() as found:
        found.memory.malloc(3 * MIB)
        flat = torch.cuda.memory_stats()

        assert flat == found.memory.stats()
        assert torch.cuda.memory_stats_as_nested_dict()["active_bytes"]["large_pool"]["current"] == 3 * MIB
        torch.cuda.reset_accumulated_memory_stats()
        assert torch.cuda.memory_stats()["active_bytes.all.allocated"] == 0
        assert torch.cuda.host_memory_stats() == {}


def test_pytorch_writes_its_own_summary():
    with machine() as found:
        found.memory.malloc(300 * MIB)
        summary = torch.cuda.memory_summary()

    assert "PyTorch CUDA memory summary, device ID 0" in summary
    assert "| Allocated memory      | 307200 KiB | 307200 KiB | 307200 KiB |      0 B   |" in summary


def test_what_is_free_is_less_the_context_and_what_is_reserved():
    with machine() as found:
        assert torch.cuda.mem_get_info() == (T4.usable_bytes - T4.context_bytes, T4.usable_bytes)
        found.memory.malloc(3 * MIB)
        assert torch.cuda.mem_get_info("cuda")[0] == T4.usable_bytes - T4.context_bytes - 20 * MIB


def test_a_device_of_unknown_size_has_a_tebibyte():
    with machine(replace(T4, usable_bytes=None, context_bytes=None)) as found:
        found.memory.malloc(2 * GIB)

        assert torch.cuda.mem_get_info() == (2**40 - 2 * GIB, 2**40)


def test_a_run_without_limit_never_has_less_than_nothing():
    small = replace(T4, usable_bytes=1 * GIB)
    memory = LiveAllocator(AllocatorOptions(), None)
    memory.malloc(2 * GIB)

    assert "of which 0 bytes is free" in out_of_memory_message(small, memory, 1)


def test_other_devices_are_empty():
    with machine(count=2) as found:
        found.memory.malloc(3 * MIB)

        assert torch.cuda.memory_allocated(1) == 0
        assert torch.cuda.memory_allocated(0) == 3 * MIB
        assert torch.cuda.mem_get_info(1)[0] == T4.usable_bytes - T4.context_bytes
        torch.cuda.reset_peak_memory_stats(1)
        assert torch.cuda.max_memory_allocated(0) == 3 * MIB
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.cuda.mem_get_info(2)


def test_snapshots_have_every_segment_and_block():
    with machine() as found:
        found.memory.malloc(1000)
        found.memory.malloc(30 * MIB)
        small, large = torch.cuda.memory_snapshot()
        assert torch.cuda.memory._snapshot()["segments"] == [small, large]

    assert (small["segment_type"], small["total_size"], small["allocated_size"]) == ("small", 2 * MIB, 1024)
    used, free = small["blocks"]
    assert (used["state"], used["size"], used["requested_size"]) == ("active_allocated", 1024, 1000)
    assert (free["state"], free["size"], free["address"]) == ("inactive", 2 * MIB - 1024, used["address"] + 1024)
    assert (large["segment_type"], large["requested_size"]) == ("large", 30 * MIB)


def test_a_process_may_allow_itself_a_fraction():
    with machine() as found:
        torch.cuda.set_per_process_memory_fraction(0.5)

        assert torch.cuda.get_per_process_memory_fraction() == 0.5
        assert found.memory.malloc(8_000 * MIB) is None
        assert f"{format_bytes(7_500 * MIB)} allowed; Of the allocated memory" in out_of_memory_message(
            T4, found.memory, 8_000 * MIB
        )


def test_other_libraries_may_allocate():
    with machine() as found:
        address = torch.cuda.caching_allocator_alloc(3 * MIB)
        assert address > 0
        assert found.memory.allocated_bytes == 3 * MIB
        torch.cuda.caching_allocator_delete(address)
        assert found.memory.allocated_bytes == 0
        with pytest.raises(RuntimeError, match="invalid device pointer"):
            torch.cuda.caching_allocator_delete(address)
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 20.00 GiB"):
            torch.cuda.caching_allocator_alloc(20 * GIB)


def test_history_is_refused_with_a_note(tmp_path):
    with machine() as found:
        torch.cuda.memory._record_memory_history(max_entries=10)
        torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)

    assert not list(tmp_path.iterdir())
    assert {code for code, _ in found.notes} == {MEMORY_HISTORY}


def test_private_pools_are_common_ones_with_a_note():
    with machine() as found:
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            found.memory.malloc(1)

    assert [code for code, _ in found.notes] == [MEMORY_POOL]


def test_settings_that_come_late_are_refused_with_a_note():
    with machine() as found, pytest.warns(FutureWarning, match="deprecated"):
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")

    assert [code for code, _ in found.notes] == ["allocator-settings"]


def test_what_needs_the_driver_raises_as_without_it():
    with machine():
        assert torch.cuda.get_allocator_backend() == "native"
        for ask in (torch.cuda.utilization, torch.cuda.temperature, torch.cuda.power_draw, torch.cuda.clock_rate):
            with pytest.raises((ModuleNotFoundError, RuntimeError)):
                ask()


# Lines of real errors; PyTorch 2.12 and later name PYTORCH_CUDA_ALLOC_CONF and this page.
HINT = (
    "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation.  See documentation for Memory Management  "
    "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)


def test_the_error_has_the_words_of_pytorch():
    memory = LiveAllocator(AllocatorOptions(), T4.usable_bytes - T4.context_bytes)
    for size in (14_000 * MIB, 3 * MIB):
        memory.malloc(size)

    assert out_of_memory_message(T4, memory, 2 * GIB + 1) == (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.65 GiB of which 845.00 MiB "
        "is free. Including non-PyTorch memory, this process has 13.82 GiB memory in use. Of the allocated memory "
        "13.67 GiB is allocated by PyTorch, and 17.00 MiB is reserved by PyTorch but unallocated. " + HINT
    )


def test_the_error_names_what_was_asked_of_the_device():
    memory = LiveAllocator(AllocatorOptions(), 0)

    messages = [out_of_memory_message(T4, memory, size, index=3, process_id=42) for size in (10, 2 * MIB, 11 * MIB)]

    assert [message.split(". GPU 3")[0].rpartition("allocate ")[2] for message in messages] == [
        "2.00 MiB",
        "20.00 MiB",
        "12.00 MiB",
    ]
    assert "is free. Process 42 has 135.00 MiB memory in use. Of the allocated memory 0 bytes is" in messages[0]


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 bytes"),
        (1024, "1024 bytes"),
        (1025, "1.00 KiB"),
        (1 * MIB, "1024.00 KiB"),
        (1 * MIB + 1, "1.00 MiB"),
        (1002 * MIB, "1002.00 MiB"),
        (1 * GIB, "1024.00 MiB"),
        (int(14.56 * GIB), "14.56 GiB"),
    ],
)
def test_sizes_are_written_as_pytorch_writes_them(size_bytes, text):
    assert format_bytes(size_bytes) == text

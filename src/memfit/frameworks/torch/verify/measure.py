"""Measures the device in hand: what a step takes on it, and what the device itself can do.

On a GPU the caching allocator counts; on the host PyTorch's profiler reports every allocation and free of its
allocator, what kernels take for themselves included. The GPU's part was written by the book and never ran on one: it
runs on the simulated device.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from memfit.core import env
from memfit.core.job import Job
from memfit.core.units import MIB
from memfit.core.verification import Measured
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.apply.loss_function import as_loss
from memfit.frameworks.torch.shapes.stand_in import map_tensors, tensors_in
from memfit.frameworks.torch.shapes.tensor_types import AUTOCAST
from memfit.frameworks.torch.trace.calibration import fastest

_NUM_COUNTED_STEPS = 2
_MOST_TIMED_STEPS = 10
_MATRIX = {"cuda": 4096, "cpu": 1024}
_COPY_BYTES = {"cuda": 256 * MIB, "cpu": 32 * MIB}
_NUM_LAUNCHES = 200
_CHILD_SECONDS = 60
# Another process with a context of its own: one product, then it waits until its input ends.
_CHILD = """
import sys, torch
matrix = torch.ones(256, 256, device="cuda")
(matrix @ matrix).sum().item()
print(torch.cuda.memory_reserved(), flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class StepRun:
    """A step that was run: peaks of two steps, as a job's estimate has them, and the time of one."""

    allocated_bytes: int
    reserved_bytes: int | None
    seconds: float


class Runner:
    """Runs jobs on the device called `kind`: "cuda" or "cpu"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def run(self, job: Job, batch_size: int, seconds: float) -> StepRun:
        """Two steps whose memory is counted, then some more for about `seconds`."""
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if self.kind == "cuda" else ()):
            torch.manual_seed(0)
            return (
                self._on_gpu(job, batch_size, seconds)
                if self.kind == "cuda"
                else self._on_host(job, batch_size, seconds)
            )

    def wait(self) -> None:
        """Waits for what the device still computes."""
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def measure_device(self) -> Measured:
        """What the device itself has and does."""
        on_gpu = self.kind == "cuda"
        usable_bytes = torch.cuda.mem_get_info()[1] if on_gpu else None
        workspace_bytes = self._workspace_bytes() if on_gpu else None
        context_bytes = measure_context() if on_gpu else None
        copy_bytes = _COPY_BYTES[self.kind]
        source = torch.ones(copy_bytes, dtype=torch.uint8, device=self.kind)
        target = torch.empty_like(source)
        copy = fastest(self._waiting(lambda: target.copy_(source)), 0.1)
        transfer = None
        if on_gpu:
            pinned = torch.ones(copy_bytes, dtype=torch.uint8).pin_memory()
            transfer = copy_bytes / fastest(self._waiting(lambda: target.copy_(pinned, non_blocking=True)), 0.1)
        small = torch.ones(1, device=self.kind)

        def launch() -> None:
            for _ in range(_NUM_LAUNCHES):
                small.add_(1)

        return Measured(
            usable_bytes=usable_bytes,
            context_bytes=context_bytes,
            cublas_workspace_bytes=workspace_bytes,
            launch_seconds=fastest(self._waiting(launch), 0.05) / _NUM_LAUNCHES,
            bandwidth_bytes_per_second=2 * copy_bytes / copy,
            transfer_bytes_per_second=transfer,
            flops=self._products(),
        )

    def _products(self) -> dict[str, float]:
        """Rates of large products, in the types that the device computes in."""
        types = {"float32": torch.float32}
        if self.kind == "cuda":
            types["float16"] = torch.float16
            if torch.cuda.get_device_capability() >= (8, 0):
                types["bfloat16"] = torch.bfloat16
        return {name: self._product_rate(dtype) for name, dtype in types.items()}

    def _product_rate(self, dtype: torch.dtype) -> float:
        size = _MATRIX[self.kind]
        left = torch.ones(size, size, dtype=dtype, device=self.kind)
        product = torch.empty_like(left)
        return 2 * size**3 / fastest(self._waiting(lambda: torch.mm(left, left, out=product)), 0.1)

    def _waiting(self, work: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            work()
            self.wait()

        return run

    def _workspace_bytes(self) -> int:
        """What the first product of this process takes and keeps; 0 where an earlier one took it."""
        left = torch.ones(64, 64, device="cuda")
        before = torch.cuda.memory_allocated()
        product = left @ left
        self.wait()
        return torch.cuda.memory_allocated() - before - product.untyped_storage().nbytes()

    def _on_gpu(self, job: Job, batch_size: int, seconds: float) -> StepRun:
        # As in a process of its own.
        internals.clear_cublas_workspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        steps = self._steps(job, batch_size)
        for _ in range(_NUM_COUNTED_STEPS):
            next(steps)
        self.wait()
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return StepRun(allocated, reserved, self._time(steps, seconds))

    def _on_host(self, job: Job, batch_size: int, seconds: float) -> StepRun:
        env.quiet_profiler()
        steps = self._steps(job, batch_size)
        baseline = next(steps)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            for _ in range(_NUM_COUNTED_STEPS):
                next(steps)
        peak, _ = find_peak(allocations(profiled))
        return StepRun(baseline + peak, None, self._time(steps, seconds))

    def _time(self, steps: Iterator[int], seconds: float) -> float:
        times: list[float] = []
        while not times or (sum(times) < seconds and len(times) < _MOST_TIMED_STEPS):
            begun = time.perf_counter()
            next(steps)
            self.wait()
            times.append(time.perf_counter() - begun)
        return median(times)

    def _steps(self, job: Job, batch_size: int) -> Iterator[int]:
        """First the bytes that are there before any step, then one step after the other."""
        model = job.model().to(self.kind).train()
        batch = map_tensors(job.batch(batch_size), lambda tensor: tensor.to(self.kind))
        optimizer = job.optimizer(model.parameters())
        loss, dtype = as_loss(job.loss), AUTOCAST.get(job.precision or "")
        held = [*model.parameters(), *model.buffers(), *tensors_in(batch)]
        if self.kind == "cpu":
            yield storage_bytes(held)
        del held
        value = None
        while True:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self.kind, dtype=dtype) if dtype else nullcontext():
                value = loss(model, batch)
            value.backward()
            optimizer.step()
            yield 0


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind the tensors."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def allocations(profiled: profile) -> list[tuple[int, int, tuple[str, ...]]]:
    """(time, change in bytes, names of the ops around it, outermost first) of each allocation and free, in order."""

    def walk(events: list[Any], path: tuple[str, ...]) -> Iterator[tuple[int, int, tuple[str, ...]]]:
        for event in events:
            if event.name == "[memory]":
                yield event.start_time_ns, event.typed[1].alloc_size, path
            yield from walk(event.children, (*path, event.name))

    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    tree = profiled.profiler.kineto_results.experimental_event_tree()
    return sorted(walk(tree, ()), key=lambda row: row[0])


def find_peak(rows: list[tuple[int, int, tuple[str, ...]]]) -> tuple[int, tuple[str, ...]]:
    """The greatest running sum, and the ops around the allocation that first reached it."""
    total = peak = 0
    where: tuple[str, ...] = ()
    for _, change, path in rows:
        total += change
        if total > peak:
            peak, where = total, path
    return peak, where


def measure_context() -> int | None:
    """What another process takes of this GPU beside its tensors; None where it can't be started, or ends at once.

    The difference in free memory is that of the whole device: whatever others take or give back meanwhile counts, too,
    so that the least of three processes is the answer.
    """
    sizes: list[int] = []
    for _ in range(3):
        size = _context_of_child()
        if size is None:
            return None
        sizes.append(size)
    return min(sizes)


def _context_of_child() -> int | None:
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError:
        return None
    # One that hangs ends the reading of its output.
    watch = threading.Timer(_CHILD_SECONDS, child.kill)
    watch.start()
    try:
        assert child.stdout is not None
        words = child.stdout.readline().split()
        after = torch.cuda.mem_get_info()[0]
    finally:
        watch.cancel()
        child.kill()
        child.communicate()
    taken = before - after - int(words[0]) if words and words[0].isdigit() else 0
    return taken if taken > 0 else None

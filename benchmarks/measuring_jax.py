"""What a compiled step of JAX takes of the host's memory, measured.

A fresh process makes the arguments, compiles the step, runs it a few times, and measures: the resident memory before a
run, and the highest while it runs (VmHWM, which the kernel resets through /proc/self/clear_refs). The allocator is told
to take every large block from the kernel and to give it back at once, so that nothing measured is a leftover. What the
step holds is then: its arguments, and all that resident memory rose above them. XLA fills what it sets aside only as it
needs it: pages that are never touched are no memory, and are not seen.

Compiling leaves a heap of up to a gigabyte that is full of holes, and what the step takes may land in them. Where their
pages are still there, it is not seen; where they were given back (`malloc_trim`), small blocks fault some in again
wherever holes are, and far more is seen than is in use. So the holes are given back and then filled: whatever the heap
still has to give in large blocks is asked for and kept. From the third run on, runs are measured.

    python -m benchmarks.measuring_jax            # the table: predicted against measured
"""

import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Made = tuple[Callable[..., Any], tuple[Any, ...]]
"""A step and its arguments."""

NUM_FIRST = 2
"""Runs that don't count."""
_NUM_RUNS = 9
_LARGEST_HOLE, _SMALLEST_MAPPED = 1 << 28, 65536

_ENVIRONMENT = {
    # Blocks from 64 KiB on are mapped one by one and unmapped when they are freed, unless the heap has room for them.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_ARENA_MAX": "1",
    "JAX_PLATFORMS": "cpu",
}


def measure(make: str) -> dict[str, int]:
    """Bytes that a step takes, in a process of its own.

    Args:
        make: "module:function"; the function gives the step and its arguments as arrays.

    Returns:
        "measured": arguments, and what runs added at most, in the median; "argument": of these the arguments.
    """
    environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(["src", ".", *sys.path[:1]])}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.measuring_jax", "--child", make],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{make} failed with {done.returncode}:\n{done.stderr[-2000:]}")
    answer: dict[str, int] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def _child(make: str) -> dict[str, int]:
    import importlib

    import jax

    module, _, name = make.partition(":")
    step, arguments = getattr(importlib.import_module(module), name)()
    compiled = step.lower(*arguments).compile()
    donated = set(compiled.donate_argnums)

    def copies() -> list[Any]:
        # A donated argument is gone after the run.
        leaves = jax.tree.leaves(arguments)
        return [leaf.copy() if number in donated else leaf for number, leaf in enumerate(leaves)]

    structure = jax.tree.structure(arguments)
    argument_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(arguments))
    found = []
    for number in range(NUM_FIRST + _NUM_RUNS):
        given = jax.tree.unflatten(structure, copies())
        jax.block_until_ready(given)
        found.append(rise(lambda given=given: jax.block_until_ready(compiled(*given)), number))
        del given
    from memfit.frameworks.jax.trace.compiled import compile_step

    predicted = compile_step(step, arguments).assigned_bytes
    measured = argument_bytes + int(statistics.median(found[NUM_FIRST:]))
    return {"measured": measured, "argument": argument_bytes, "predicted": predicted}


def rise(run: Callable[[], Any], number: int) -> int:
    """Bytes by which resident memory rises at most while something runs.

    Args:
        run: what to run.
        number: how often it has run before.
    """
    gc.collect()
    if number < NUM_FIRST:
        fill_heap()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def fill_heap() -> None:
    """Gives free pages of the heap back, and takes all of its large holes, so that nothing else lands there."""
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    library.malloc_trim(0)
    line = next(line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[heap]"))
    first, last = (int(part, 16) for part in line.split()[0].split("-"))
    size = _LARGEST_HOLE
    while size >= _SMALLEST_MAPPED:
        taken = library.malloc(size)
        if taken is None or not first <= taken < last:
            # The heap has no hole of this size left: this one was mapped.
            library.free(taken)
            size -= max(size // 8, 4096)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(_child(sys.argv[2])))
    else:
        from benchmarks import jax_steps

        for case in jax_steps.CASES:
            found = measure(f"benchmarks.jax_steps:{case}")
            error = 100 * (found["predicted"] / found["measured"] - 1)
            print(
                f"{case:24s} {found['predicted'] / 2**20:8.1f} {found['measured'] / 2**20:8.1f} {error:+6.2f}%",
                flush=True,
            )

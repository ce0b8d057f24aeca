"""What a compiled step of JAX takes of the host's memory, measured.

A fresh process makes the arguments, compiles the step, runs it a few times, and measures: the resident memory before a
run, and the highest while it runs (VmHWM, which the kernel resets through /proc/self/clear_refs). The allocator is told
to take every large block from the kernel and to give it back at once, so that nothing measured is a leftover. What the
step holds is then: its arguments, and all that resident memory rose above them. XLA fills what it sets aside only as it
needs it: pages that are never touched are no memory, and are not seen.

Compiling leaves a heap of a gigabyte that is full of holes. Their pages are given back once, before the second run.
Small blocks then fault some of them in again, wherever holes are: 27 MiB in a step of DenseNet121 of which 0.2 MiB are
ever in use. That is no memory of the step, and happens once: from the third run on, runs are measured.

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

_ENVIRONMENT = {
    # Blocks from 64 KiB on are mapped one by one and unmapped when they are freed.
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
    from memfit.adapters.jax.compiled import compile_step

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
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


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

"""Compiled functions and what they hold."""

from dataclasses import replace

import numpy as np
import pytest

from memfit.core.errors import StepFailed
from memfit.core.timeline import Category, Timeline
from memfit.frameworks.jax.trace.compiled import compile_step
from memfit.frameworks.xla.program import XlaProgram

jax = pytest.importorskip("jax")
jnp = jax.numpy
MATRIX = jax.ShapeDtypeStruct((256, 256), "float32")
BYTES = 256 * 256 * 4


def describe(number):
    return (Category.PARAMETER, f"leaf {number}")


def test_donated_arguments_are_counted_once():
    def step(w, x):
        return w - 0.1 * jnp.sin(x)

    kept = compile_step(step, (MATRIX, MATRIX))
    donated = compile_step(step, (MATRIX, MATRIX), donate_argnums=(0,))

    assert kept.argument_bytes == donated.argument_bytes == 2 * BYTES
    assert (kept.alias_bytes, donated.alias_bytes) == (0, BYTES)
    assert (kept.assigned_bytes, donated.assigned_bytes) == (3 * BYTES, 2 * BYTES)


def test_a_jitted_function_keeps_its_own_options():
    step = jax.jit(lambda times, x: x * times, static_argnums=0, donate_argnums=1)

    assert compile_step(step, (3, MATRIX)).assigned_bytes == BYTES


def test_arguments_that_the_program_drops_are_still_held():
    compiled = compile_step(lambda unused, x: jnp.sin(x), (MATRIX, MATRIX))
    timeline = compiled.timeline(describe)

    assert compiled.unused == ((0, BYTES),)
    assert compiled.argument_bytes == 2 * BYTES
    modules = [block.module for block in timeline.blocks]
    assert {"leaf 0", "leaf 1"} <= set(modules)
    assert timeline.peak()[1] == compiled.assigned_bytes == 3 * BYTES
    assert timeline.marks[0].tick == 0
    ticks = [block.start for block in timeline.blocks]
    assert ticks == sorted(set(ticks))


def test_arrays_that_a_step_closes_over_count():
    closed = np.random.default_rng(0).standard_normal((256, 256), dtype=np.float32)

    compiled = compile_step(lambda x: x @ closed, (MATRIX,))

    assert compiled.constant_bytes + compiled.argument_bytes >= 2 * BYTES


def test_checkpoints_recompute_as_on_a_gpu():
    def block(w, x):
        return jnp.tanh(jnp.tanh(jnp.tanh(x @ w) @ w) @ w)

    def loss(w, x):
        for _ in range(6):
            x = jax.checkpoint(block)(w, x)
        return jnp.mean(x)

    tall = jax.ShapeDtypeStruct((4096, 64), "float32")
    small = jax.ShapeDtypeStruct((64, 64), "float32")

    on_cpu = compile_step(jax.grad(loss), (small, tall))
    on_gpu = compile_step(jax.grad(loss), (small, tall), as_on_gpu=True)

    assert on_gpu.temporary_bytes < 0.75 * on_cpu.temporary_bytes
    assert on_gpu.scratch is None and on_gpu.trace(Timeline((), 0), (), 0).spread == (1.0, 1.0)
    # On the CPU products pack operands, more or less of which is there at the peak.
    laid_out = on_cpu.argument_bytes + on_cpu.output_bytes + on_cpu.temporary_bytes + on_cpu.constant_bytes
    least, greatest = (factor * on_cpu.assigned_bytes for factor in on_cpu.trace(Timeline((), 0), (), 0).spread)
    assert least <= laid_out < on_cpu.assigned_bytes < greatest


def test_a_backend_that_says_nothing_is_named(monkeypatch):
    class Silent:
        def compile(self, compiler_options=None):
            return self

        def memory_analysis(self):
            return None

        def as_text(self):
            return ""

    from memfit.frameworks.jax.trace.compiled import read

    with pytest.raises(StepFailed, match="says nothing about the memory"):
        read(Silent())


def test_devices_that_run_a_program_together_are_counted():
    alone = compile_step(lambda x: x * 2, (jax.ShapeDtypeStruct((8,), "float32"),))
    head, _, rest = alone.program.text.partition("\n")

    together = replace(alone, program=XlaProgram(f"{head}, replica_count=2, num_partitions=4\n{rest}"))

    assert (alone.num_devices, together.num_devices) == (1, 8)

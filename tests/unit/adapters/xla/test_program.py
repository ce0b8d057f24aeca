import os

import pytest

from memfit.adapters.xla.placement import Placement, Slice
from memfit.adapters.xla.program import HostRun, Program, num_processors
from memfit.core.timeline import Category
from tests.unit.adapters.xla.programs import STEP

PRODUCTS = STEP.replace("64,16", "4096,1024").replace("16,16", "1024,1024")


def describe(number):
    return (Category.PARAMETER, "layer1") if number == 0 else (Category.BATCH, "")


def test_a_run_takes_what_is_laid_out_and_what_kernels_take():
    program = Program(PRODUCTS)

    run = program.on_host(num_threads=2)

    # THEN temporary memory and results are written to in the end; products pack slices of their operands meanwhile
    layout = program.layout
    taken = layout.total_bytes - layout.argument_bytes - program.lives.table_bytes
    largest = max(size for _, _, size in run.scratch)
    assert len(run.scratch) == 2
    assert taken < run.peak_bytes <= taken + largest
    assert run.least_bytes <= run.peak_bytes <= run.greatest_bytes


def test_one_thread_packs_nothing_for_others():
    program = Program(PRODUCTS)

    alone, together = (program.on_host(num_threads=number) for number in (1, 2))

    assert 0 < alone.scratch[0][2] < together.scratch[0][2]
    assert alone.peak_bytes < together.peak_bytes


def test_scratch_is_part_of_the_timeline():
    program = Program(PRODUCTS)
    run = program.on_host(num_threads=2)

    timeline = program.timeline(describe, run=run)

    sizes = sorted(block.size_bytes for block in timeline.blocks if block.category is Category.WORKSPACE)
    assert sizes == sorted(size for _, _, size in run.scratch)


def test_a_placement_of_something_else_is_not_believed():
    # GIVEN one whose names are not those of the program
    program = Program(PRODUCTS)
    other = Placement({("somebody", ()): Slice(0, 0, 64)}, {0: 64})

    # THEN XLA's rules tell where values lie
    assert program.on_host(other, num_threads=2) == program.on_host(num_threads=2)
    assert program.on_host(program.layout.placement, num_threads=2) == program.on_host(num_threads=2)


def test_spreads_are_of_the_whole():
    assert HostRun(100, 50, 300, (), 0).spread(100) == (0.75, 2.0)
    assert HostRun(0, 0, 0, (), 0).spread(0) == (1.0, 1.0)


def test_threads_are_as_many_as_there_are_processors_for_the_process():
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this system has no affinities")
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert num_processors() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert num_processors() == len(allowed)

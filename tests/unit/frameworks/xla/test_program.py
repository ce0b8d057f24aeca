import os

import pytest

from memfit.core.timeline import Category
from memfit.frameworks.xla.program import Program, num_processors
from tests.unit.frameworks.xla.programs import STEP

PRODUCTS = STEP.replace("64,16", "4096,1024").replace("16,16", "1024,1024")


def describe(number):
    return (Category.PARAMETER, "layer1") if number == 0 else (Category.BATCH, "")


def test_scratch_is_part_of_the_timeline():
    program = Program(PRODUCTS)
    scratch = program.scratch(num_threads=2)

    timeline = program.timeline(describe, scratch=scratch)

    sizes = sorted(block.size_bytes for block in timeline.blocks if block.category is Category.WORKSPACE)
    assert len(sizes) == 2
    assert sizes == sorted(one.own_bytes for one in scratch)


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

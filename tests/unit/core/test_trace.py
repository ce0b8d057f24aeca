"""A trace says who serves its blocks, and what a compiler laid out."""

from dataclasses import replace

from memfit.catalogue import find_device
from memfit.core.job import Job
from memfit.core.replay import AllocatorOptions
from memfit.core.timeline import Block, Category, Phase, Timeline
from memfit.core.trace import Serving, Trace, Tracer
from memfit.estimator.estimator import Estimator


def trace(size: int = 1000, **values) -> Trace:
    blocks = (
        Block(100, 0, None, Category.PARAMETER, Phase.SETUP, "dense"),
        Block(size, 1, 2, Category.ACTIVATION, Phase.FORWARD, "dense", "Relu"),
    )
    return replace(Trace(Timeline(blocks, 3), (), 25, 100, 40), **values)


class Traced:
    name = "some"
    batch_size = 4
    notes = ()

    def __init__(self, **values) -> None:
        self._values = values

    def trace(self, batch_size, settings=None) -> Trace:
        return trace(250 * (batch_size or 4), **self._values)


def estimated(device: str = "cpu", **values):
    tracer: Tracer = Traced(**values)
    return Estimator(Job(print, None, ()), find_device(device), AllocatorOptions(), tracer, "JAX").run()


def test_blocks_are_asked_for_one_by_one():
    found = estimated()

    assert found.peak_bytes == 1100
    assert found.state_bytes == {"parameter": 100}
    assert found.at_batch(8).peak_bytes == 2100


def test_what_a_compiler_laid_out_is_the_peak():
    found = estimated(assigned_bytes=1500, state_bytes={Category.GRADIENT: 7})

    assert found.peak_bytes == 1500
    assert found.allocated_peak_bytes == 1100
    assert found.state_bytes == {"gradient": 7}


def test_the_allocator_of_tensorflow_rounds_otherwise():
    served = estimated("t4", serving=Serving.BEST_FIT)
    cached = estimated("t4", serving=Serving.CACHING)

    assert served.allocated_peak_bytes == 256 + 1024
    assert cached.allocated_peak_bytes == 512 + 1024

import pytest

from memfit.catalogue.context import assume_context_bytes
from memfit.core.units import MIB


@pytest.mark.parametrize(
    ("capability", "num_multiprocessors", "measured_bytes"),
    [((7, 5), 40, 141426688), ((8, 6), 82, 256 * MIB), ((8, 9), 142, 426 * MIB)],
)
def test_the_line_goes_through_the_measured_contexts(capability, num_multiprocessors, measured_bytes):
    assert assume_context_bytes(capability, num_multiprocessors) == pytest.approx(measured_bytes, rel=0.01)


def test_a_larger_device_has_a_larger_context():
    sizes = [assume_context_bytes((8, 6), count) for count in range(1, 200)]
    assert sizes == sorted(set(sizes))


def test_multiprocessors_with_more_threads_take_more():
    assert assume_context_bytes((8, 0), 108) > assume_context_bytes((8, 6), 108)

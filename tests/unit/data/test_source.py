import numpy as np

from memfit.data.source import Field, SampleSource
from tests.sources import ArraySource, NamedSamples


def test_bytes_of_a_sample():
    assert Field("x", np.dtype("float64"), (3, 4)).sample_bytes == 96
    assert Field("y", np.dtype("int32"), ()).sample_bytes == 4
    assert Field("nothing", np.dtype("int32"), (0, 4)).sample_bytes == 0


def test_sources_that_read_sample_by_sample_are_told_apart():
    assert isinstance(NamedSamples(3), SampleSource)
    assert not isinstance(ArraySource(np.zeros((3, 2))), SampleSource)

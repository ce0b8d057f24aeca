import numpy as np
import pytest

from memfit.core.errors import BadFile
from memfit.data.source import Field, SampleSource
from memfit.data.sources.arrow import ArrowSource
from memfit.data.sources.hdf5 import Hdf5Source
from memfit.data.sources.parquet import ParquetSource
from tests.sources import ArraySource, NamedSamples


def test_bytes_of_a_sample():
    assert Field("x", np.dtype("float64"), (3, 4)).sample_bytes == 96
    assert Field("y", np.dtype("int32"), ()).sample_bytes == 4
    assert Field("nothing", np.dtype("int32"), (0, 4)).sample_bytes == 0


def test_sources_that_read_sample_by_sample_are_told_apart():
    assert isinstance(NamedSamples(3), SampleSource)
    assert not isinstance(ArraySource(np.zeros((3, 2))), SampleSource)


@pytest.mark.parametrize("kind", [Hdf5Source, ParquetSource, ArrowSource])
def test_passwords_of_addresses_are_not_told(kind):
    address = "memory://ada:secret@folder/x"
    pytest.importorskip("fsspec").filesystem("memory").pipe(address, b"nothing of the kind")

    with pytest.raises(BadFile, match=r"'memory://ada:\*\*\*@folder/x'") as raised:
        kind(address)
    assert "secret" not in str(raised.value)

"""Tests of memfit.core.streams."""

from typing import Protocol

import numpy as np

from memfit.core.streams import BatchStream, DividedStream
from memfit.core.units import MIB
from memfit.data.stream import ArrayStream
from tests.sources import ArraySource


def test_a_stream_has_all_that_is_asked_of_one():
    stream = ArrayStream(ArraySource(np.zeros((8, 2))), batch_size=2, memory_bytes=MIB)
    for protocol in (BatchStream, DividedStream):
        asked = {*vars(protocol), *protocol.__annotations__} - {*vars(Protocol)}
        assert [name for name in asked if not name.startswith("_") and not hasattr(stream, name)] == []

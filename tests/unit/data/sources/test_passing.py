from dataclasses import replace

import numpy as np

from memfit.data.sources.passing import Passing
from tests.sources import ArraySource


def test_all_but_the_fields_is_the_sources():
    source = ArraySource(np.arange(10.0), edges=[0, 5, 10])
    passing = Passing(source, (replace(source.fields[0], name="other"),))
    out = np.empty(3)

    passing.read(2, 5, [out])
    passing.drop(0, 5)
    passing.close()

    assert out.tolist() == [2, 3, 4]
    assert passing.fields[0].name == "other"
    assert (passing.name, passing.num_samples, passing.classes) == (source.name, 10, ())
    assert passing.layout is source.layout
    assert passing.fingerprint() == source.fingerprint()

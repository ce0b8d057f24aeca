import gc

import numpy as np

from memfit.catalogue.host import resident_bytes
from memfit.core.units import MIB
from memfit.data.pages import HUGE_BYTES, pages


def test_memory_begins_with_a_huge_page_and_is_zero():
    view = pages(3 * HUGE_BYTES + 5)

    assert len(view) == 3 * HUGE_BYTES + 5
    assert np.frombuffer(view, np.uint8).ctypes.data % HUGE_BYTES == 0
    assert not any(view[::4096])
    view[-1] = 1


def test_what_nobody_uses_goes_back_at_once():
    before = resident_bytes()
    array = np.frombuffer(pages(64 * MIB), np.uint8)
    array[:] = 1
    assert resident_bytes() - before > 60 * MIB

    del array
    gc.collect()

    assert resident_bytes() - before < 16 * MIB

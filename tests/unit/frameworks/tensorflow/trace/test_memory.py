"""Counts of users."""

import pytest

from memfit.frameworks.tensorflow.trace.memory import Memory, tensor_bytes


def test_the_last_user_frees():
    memory = Memory()
    tensor = memory.make((4, 8), 4, 0)
    view = memory.same(tensor, (32,))
    assert view.buffer is tensor.buffer and view.shape == (32,)
    memory.release(tensor.buffer)
    assert tensor.buffer.end is None
    memory.release(view.buffer)
    assert (tensor.buffer.size, tensor.buffer.start, tensor.buffer.end, memory.tick) == (128, 0, 1, 2)


def test_nothing_takes_no_tick():
    memory = Memory()
    memory.release(memory.allocate(0, 0))
    memory.release(None)
    assert (memory.tick, memory.buffers) == (0, [])


def test_a_list_frees_what_it_alone_holds():
    memory = Memory()
    kept, gone = memory.make((1,), 4, 0), memory.make((1,), 4, 0)
    listed = memory.allocate(0, 1)
    listed.items = [memory.same(kept, (1,)), gone]
    memory.release(listed)
    assert kept.buffer.end is None and gone.buffer.end is not None


@pytest.mark.parametrize(("shape", "item_bytes", "size"), [((), 4, 4), ((2, 3), 4, 24), ((0, 5), 4, 0), ((7,), 0, 0)])
def test_a_tensor_has_its_elements(shape, item_bytes, size):
    assert tensor_bytes(shape, item_bytes) == size

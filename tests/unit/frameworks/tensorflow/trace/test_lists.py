"""Lists of tensors: what they share and what they copy."""

import numpy as np
import pytest

from memfit.frameworks.tensorflow.trace.lists import Lists
from memfit.frameworks.tensorflow.trace.memory import Memory, Tensor
from tests.unit.frameworks.tensorflow.graphs import node


@pytest.fixture
def memory():
    return Memory()


def run(memory, op, *inputs, shape=(), item_bytes=0, num_outputs=1):
    made = node("n", op, shape=shape, item_bytes=item_bytes, num_outputs=num_outputs)
    return Lists(memory).outputs(7, made, list(inputs))


def number(value):
    return Tensor(None, (), 4, np.array(value))


def live(memory):
    return sum(buffer.size for buffer in memory.buffers if buffer.end is None)


def reserved(memory, count):
    return run(memory, "TensorListReserve", number(0), number(count))[0]


@pytest.mark.parametrize("columns", [16, 17])
def test_elements_of_a_tensor_are_copies_aligned_or_not(memory, columns):
    whole = memory.make((3, columns), 4, 0)
    (listed,) = run(memory, "TensorListFromTensor", whole)
    memory.release(whole.buffer)
    assert [item.shape for item in listed.buffer.items] == [(columns,)] * 3
    assert live(memory) == 3 * columns * 4


def test_what_was_never_set_takes_nothing(memory):
    listed = reserved(memory, 4)
    assert live(memory) == 0
    (read,) = run(memory, "TensorListGetItem", listed, number(2), shape=(8,), item_bytes=4)
    assert read.buffer.size == 32


def test_a_list_that_others_hold_is_copied_before_it_changes(memory):
    listed, element = reserved(memory, 2), memory.make((8,), 4, 0)
    listed.buffer.refs += 1
    (changed,) = run(memory, "TensorListSetItem", listed, number(1), element)
    assert changed.buffer is not listed.buffer
    assert listed.buffer.items[1].buffer is None and changed.buffer.items[1].buffer is element.buffer


def test_zeros_of_a_list_are_as_large_as_what_is_set_in_it(memory):
    listed, element = reserved(memory, 3), memory.make((8,), 4, 0)
    (changed,) = run(memory, "TensorListSetItem", listed, number(0), element)
    (zeros,) = run(memory, "ZerosLike", changed)
    assert live(memory) == 64
    assert [item.buffer is None for item in zeros.buffer.items] == [False, True, True]


def test_a_sum_takes_the_only_element_and_makes_a_new_one_of_two(memory):
    whole = memory.make((2, 8), 4, 0)
    (first,) = run(memory, "TensorListFromTensor", whole)
    (second,) = run(memory, "TensorListSetItem", reserved(memory, 2), number(1), memory.make((8,), 4, 0))
    before = live(memory)
    (total,) = run(memory, "AddN", first, second)
    assert live(memory) == before + 32
    assert total.buffer.items[0].buffer is first.buffer.items[0].buffer
    assert total.buffer.items[1].buffer not in (first.buffer.items[1].buffer, second.buffer.items[1].buffer)


def test_elements_end_to_end_and_their_lengths(memory):
    listed = run(memory, "EmptyTensorList", number(0), number(0))[0]
    for rows in (3, 5):
        (listed,) = run(memory, "TensorListPushBack", listed, memory.make((rows, 2), 4, 0))
    joined, lengths = run(memory, "TensorListConcatV2", listed, shape=None, item_bytes=4, num_outputs=2)
    assert (joined.shape, lengths.shape) == ((8, 2), (2,))


def test_the_last_element_is_popped(memory):
    whole = memory.make((2, 8), 4, 0)
    (listed,) = run(memory, "TensorListFromTensor", whole)
    rest, last = run(memory, "TensorListPopBack", listed, shape=(8,), item_bytes=4, num_outputs=2)
    assert len(rest.buffer.items) == 1 and last.shape == (8,)


def test_other_operators_and_other_tensors_are_left_alone(memory):
    tensor = memory.make((8,), 4, 0)
    assert run(memory, "AddN", tensor, tensor) is None
    assert run(memory, "Relu", tensor) is None

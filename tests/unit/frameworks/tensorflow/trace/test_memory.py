"""Counts of users."""

import numpy as np
import pytest

from memfit.frameworks.tensorflow.trace.memory import Lists, LoopFrame, Memory, Tensor, tensor_bytes
from tests.unit.frameworks.tensorflow.graphs import node


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


def test_only_so_many_iterations_run_at_once():
    frame = LoopFrame(None, "loop", num_entries=0, limit=2)
    assert not frame.is_full
    frame.iterations[0].num_active = 1
    frame.following()
    assert frame.is_full and frame.ended() is None
    frame.iterations[0].num_active = 0
    assert frame.ended() is frame.iterations[0]
    assert not frame.is_full


def test_iterations_end_in_their_order():
    frame = LoopFrame(None, "loop", limit=3)
    first, second = frame.iterations[0], frame.following()
    first.num_frames = 1
    assert frame.ended() is None
    first.num_frames = 0
    assert [frame.ended(), frame.ended(), frame.ended()] == [first, second, None]
    assert frame.is_done


def test_a_loop_waits_for_all_that_enters_it():
    frame = LoopFrame(None, "loop", num_entries=1)
    assert frame.ended() is None and not frame.is_done
    frame.num_entries = 0
    assert frame.ended() is frame.iterations[0] and frame.is_done


def test_ways_out_count_for_the_last_iteration_alone():
    frame = LoopFrame(None, "loop", limit=2)
    frame.dead_exits.append(3)
    frame.following()
    assert frame.dead_exits == []


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

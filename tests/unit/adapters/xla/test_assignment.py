"""XLA's buffer assignment, read from its serialized form."""

from memfit.adapters.xla.assignment import read_assignment, read_names
from memfit.adapters.xla.placement import Slice


def message(number, content):
    return bytes([number << 3 | 2, len(content)]) + content


def test_allocations_are_read_with_what_lies_in_them():
    argument = bytes([8, 0, 16, 64, 40, 1, 48, 3, 104, 1, 56, 1]) + message(9, bytes([8, 5, 24, 64]))
    constant = bytes([8, 1, 16, 8, 96, 1])
    temporary = bytes([8, 2, 16, 100]) + message(9, bytes([8, 6, 16, 32, 24, 16])) + message(9, bytes([8, 7, 24, 9]))
    peak = bytes([8, 2]) + message(2, bytes([6, 7]))

    found = read_assignment(message(3, argument) + message(3, constant) + message(3, temporary) + message(5, peak))

    assert found.allocations[0].argument == 3
    assert found.allocations[0].is_aliased
    assert found.allocations[2].buffers == {6: (32, 16), 7: (0, 9)}
    assert [allocation.is_temporary for allocation in found.allocations] == [False, False, True]
    assert (found.constant_bytes, found.temporary_bytes) == (8, 100)
    assert found.at_peak == {2: (6, 7)}


def test_values_lie_where_their_buffers_do():
    # GIVEN an argument, a constant, what one thread has for itself, and a temporary range with two buffers
    argument = bytes([8, 0, 16, 64, 40, 1, 48, 3]) + message(9, bytes([8, 5, 24, 64]))
    constant = bytes([8, 1, 16, 8, 96, 1])
    own = bytes([8, 3, 16, 8, 24, 1])
    temporary = bytes([8, 2, 16, 100]) + message(9, bytes([8, 6, 16, 32, 24, 16])) + message(9, bytes([8, 7, 24, 9]))
    ranges = b"".join(message(3, one) for one in (argument, constant, own, temporary))
    # made by the instructions 9 (as a whole) and 10 (the parts 2 and 1 of its tuple), and one that nobody knows
    buffers = (
        message(1, bytes([8, 5]) + message(3, bytes([32, 9])))
        + message(1, bytes([8, 6]) + message(3, message(3, bytes([2, 1])) + bytes([32, 10])))
        + message(1, bytes([8, 7]) + message(3, bytes([32, 77])))
    )

    found = read_assignment(buffers + ranges).placement({9: "x", 10: "sorted"})

    # THEN values are found by name, and ranges are those that a run takes
    assert found.slices == {("x", ()): Slice(0, 0, 64), ("sorted", (2, 1)): Slice(2, 32, 16)}
    assert found.ranges == {2: 100}


def test_names_of_instructions_are_read_from_a_module():
    def instruction(name, number):
        return message(2, message(1, name) + bytes([35 << 3 & 127 | 128, 35 << 3 >> 7, number]))

    computation = message(1, b"main") + instruction(b"x", 9) + instruction(b"sorted", 10)

    assert read_names(message(1, b"jit_step") + message(3, computation)) == {9: "x", 10: "sorted"}

"""XLA's buffer assignment, read from its serialized form."""

from memfit.adapters.xla.assignment import read_assignment


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

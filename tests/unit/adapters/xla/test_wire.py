"""The reader of protocol buffers' wire format."""

import pytest

from memfit.adapters.xla.wire import fields, numbers
from memfit.core.errors import BadFile


def test_all_wire_types_are_read():
    data = bytes([8, 150, 1, 18, 2, 104, 105, 29, 1, 0, 0, 0, 33, 1, 0, 0, 0, 0, 0, 0, 0])

    assert list(fields(data)) == [(1, 150), (2, b"hi"), (3, b"\1\0\0\0"), (4, b"\1\0\0\0\0\0\0\0")]


def test_repeated_numbers_come_packed_or_one_by_one():
    assert numbers(bytes([199, 1, 3])) == [199, 3]
    assert numbers(7) == [7]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (bytes([18, 5, 104]), "ends inside of its field 2"),
        (bytes([8, 150]), "ends inside of a number"),
        (bytes([11]), "unknown wire type 3"),
    ],
)
def test_broken_messages_are_refused(data, message):
    with pytest.raises(BadFile, match=message):
        list(fields(data))

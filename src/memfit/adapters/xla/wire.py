"""Reads the wire format of protocol buffers, without a description of the messages.

XLA serialises its buffer assignment so; a reader of fields by their numbers is all that is needed.
"""

from collections.abc import Iterator

from memfit.core.errors import BadFile


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field: whole numbers as such, everything else as bytes.

    >>> list(fields(bytes([8, 150, 1, 18, 2, 104, 105])))
    [(1, 150), (2, b'hi')]
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value: int | bytes
            value, at = _varint(data, at)
        elif kind in (1, 2, 5):
            size, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            value, at = data[at : at + size], at + size
            if at > len(data):
                raise BadFile(f"a message of protocol buffers ends inside of its field {number}.")
        else:
            raise BadFile(f"field {number} of a message of protocol buffers has the unknown wire type {kind}.")
        yield number, value


def numbers(value: int | bytes) -> list[int]:
    """The whole numbers of a repeated field, packed or single.

    >>> numbers(bytes([199, 1, 3]))
    [199, 3]
    """
    if isinstance(value, int):
        return [value]
    found, at = [], 0
    while at < len(value):
        number, at = _varint(value, at)
        found.append(number)
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        if at >= len(data):
            raise BadFile("a message of protocol buffers ends inside of a number.")
        byte = data[at]
        at += 1
        result |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return result, at

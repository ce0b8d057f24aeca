"""Unpickles plain data from files that anyone may have written: dictionaries, lists, numbers and text.

A pickle is a program for a small machine, and CPython's machine trusts it. Here no class or function is loaded, and
before it runs, its instructions are looked at: how many objects it makes, and the indices of its table of objects
(2**31 in six bytes makes CPython clear 32 GiB). Text that is no UTF-8, such as a file's name in another encoding, gets
question marks instead of ending it all.
"""

import io
import pickle
import re
from typing import Any

# Instructions of a known length that do nothing but push, collect or look up. Writes into the table with an index from
# 2**20 on are looked at one by one.
_PLAIN = re.compile(
    rb"(?:[(012NQRbdet)l}\]asuo\x81\x85-\x89\x8f-\x91\x93\x94\x97\x98]|[Khq\x80\x82].|[M\x83]..|[Jj\x84]....|r..[\x00-\x0f]\x00"
    rb"|[G\x95].{8})*+",
    re.DOTALL,
)
# Bytes of the length before what follows: text, other strings, and long integers.
_TEXT = {ord("X"): 4, 0x8C: 1, 0x8D: 8}
_BYTES = {ord("T"): 4, ord("U"): 1, ord("B"): 4, ord("C"): 1, 0x8E: 8, 0x8A: 1, 0x8B: 4}
# Lines of text that an instruction takes.
_LINES = {**dict.fromkeys(b"ILFSVPgp", 1), **dict.fromkeys(b"ci", 2)}
_STOP, _PUT, _LONG_PUT, _BYTEARRAY = b".p" + b"r\x96"
_NO_TEXT = bytes(byte if byte < 128 else ord("?") for byte in range(256))
_MOST_DIGITS = 20
# Instructions that make a list, a dictionary or a number of a byte or a few.
_MAKES = (b"]", b"}", b"M", b"J", b"G", b"\x8a")
MOST_OBJECTS = 2**25
"""Of 64 bytes and more each; a history of a million events has about eight million."""


class NamesCode(pickle.UnpicklingError):
    """A pickle that wants to load a class or a function; its text is the name."""


class CutOff(pickle.UnpicklingError):
    """A pickle that ends before its end."""


def load_plain(data: bytes) -> Any:
    """What a pickle of plain data holds.

    Raises:
        NamesCode: it would load a class or a function; nothing was run.
        CutOff: it ends too early.
        pickle.UnpicklingError: it is no pickle, or none that a well-meaning program writes.
    """
    try:
        return _Plain(io.BytesIO(_checked(data))).load()
    except EOFError as error:
        raise CutOff(str(error)) from None
    except pickle.UnpicklingError as error:
        raise (CutOff(str(error)) if "truncated" in str(error) else error) from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, MemoryError) as error:
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from None


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise NamesCode(f"{module}.{name}"[:200])

    def persistent_load(self, pid: Any) -> Any:
        raise NamesCode("an object of another file")


def _checked(data: bytes) -> bytes:
    """The pickle, with text that is no UTF-8 made readable.

    Raises:
        pickle.UnpicklingError: it has an index or an instruction that no such file has.
    """
    if sum(data.count(code) for code in _MAKES) > MOST_OBJECTS:
        raise pickle.UnpicklingError(f"it holds more than {MOST_OBJECTS:,} lists, dictionaries and numbers")
    position, repairs = 0, []
    while True:
        matched = _PLAIN.match(data, position)
        position = matched.end() if matched else position
        if position >= len(data) or data[position] == _STOP:
            break
        code = data[position]
        position += 1
        if code in _TEXT or code in _BYTES:
            width = _TEXT.get(code) or _BYTES[code]
            length = int.from_bytes(data[position : position + width], "little")
            position += width
            text = data[position : position + length]
            if code in _TEXT and not text.isascii() and not _is_text(text):
                repairs.append((position, text.translate(_NO_TEXT)))
            position += length
        elif code in _LINES:
            start = position
            for _ in range(_LINES[code]):
                position = (data.find(b"\n", position) + 1) or len(data)
            if code == _PUT:
                digits = data[start:position].strip()
                _check_index(int(digits) if digits.isdigit() and len(digits) < _MOST_DIGITS else len(data), start)
        elif code == _LONG_PUT:
            _check_index(int.from_bytes(data[position : position + 4], "little"), position)
            position += 4
        elif code == _BYTEARRAY:
            raise pickle.UnpicklingError("it holds an array of bytes")
        else:
            # The machine itself says what is wrong there.
            break
    if not repairs:
        return data
    repaired = bytearray(data)
    for start, text in repairs:
        repaired[start : start + len(text)] = text
    return bytes(repaired)


def _is_text(text: bytes) -> bool:
    try:
        text.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True


def _check_index(index: int, position: int) -> None:
    """An entry of the table takes at least its value and the instruction that writes it."""
    if index > min(position, MOST_OBJECTS):
        raise pickle.UnpicklingError(f"it writes entry {index} of a table after {position} bytes")

"""Where the values of a program lie."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Slice(NamedTuple):
    """A piece of a range of memory."""

    range: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where all values lie.

    Args:
        slices: by the name of the instruction that makes a value, and its place in the tuple that it makes.
        ranges: bytes of each range that is taken while the program runs: all but arguments and constants.
    """

    slices: Mapping[tuple[str, tuple[int, ...]], Slice]
    ranges: Mapping[int, int]

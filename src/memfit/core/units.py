"""Parsing and printing of byte sizes.

The only module that turns `"24GiB"` into a number or a number into `"24.0 GiB"`. Binary units are
powers of 1024, decimal ones powers of 1000, as the International System says; a bare `G` or `GB` in the name of a
graphics card means what its maker means by it and is never parsed here.
"""

import re

from memfit.core.errors import InvalidSize

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_FACTORS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024**4,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
}
# More than a 64-bit program can address.
_MAX_BYTES = 2**63 - 1
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def looks_like_size(text: str) -> bool:
    """Whether `text` is a number with a unit of bytes, such as "24GiB".

    >>> looks_like_size("24 GiB"), looks_like_size("a100")
    (True, False)
    """
    match = _SIZE.fullmatch(text)
    return match is not None and match[2].lower() in _FACTORS


def parse_size(text: str | int) -> int:
    """Bytes in a written size.

    >>> parse_size("1.5GiB")
    1610612736
    >>> parse_size("24 GB")
    24000000000
    """
    if isinstance(text, int):
        size_bytes = text
    else:
        match = _SIZE.fullmatch(text)
        if match is None or match[2].lower() not in _FACTORS:
            raise InvalidSize(f"{text!r} is not a size. Write a number and a unit, such as 24GiB or 800MB.")
        number = float(match[1]) * _FACTORS[match[2].lower()]
        if number > _MAX_BYTES:
            shown = text if len(text) <= 20 else f"{text[:20]}..."
            raise InvalidSize(f"{shown!r} is more than any memory has. Write a size such as 24GiB or 800MB.")
        size_bytes = int(number)
    if size_bytes <= 0:
        raise InvalidSize(f"a size must be positive, but {text!r} was given.")
    return size_bytes


def format_size(size_bytes: int | None) -> str:
    """A size as people read it; `None` is "unknown".

    >>> format_size(1610612736), format_size(0), format_size(None)
    ('1.50 GiB', '0 B', 'unknown')
    """
    if size_bytes is None:
        return "unknown"
    magnitude = abs(size_bytes)
    for unit, factor in (("TiB", 1024 * GIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if magnitude >= factor:
            return (
                f"{size_bytes / factor:.2f} {unit}" if magnitude < 10 * factor else f"{size_bytes / factor:.1f} {unit}"
            )
    return f"{size_bytes} B"


def format_seconds(seconds: float | None) -> str:
    """A time as people read it; None is "unknown".

    >>> format_seconds(0.01234), format_seconds(1.5), format_seconds(-0.0002), format_seconds(None)
    ('12.3 ms', '1.50 s', '-200 us', 'unknown')
    """
    if seconds is None:
        return "unknown"
    size = abs(seconds)
    if size >= 0.9995:
        return f"{seconds:.2f} s" if size < 10 else f"{seconds:,.1f} s"
    if size >= 0.0009995:
        digits = 0 if size >= 0.09995 else 1 if size >= 0.009995 else 2
        return f"{seconds * 1e3:.{digits}f} ms"
    return f"{seconds * 1e6:.0f} us"

"""`PYTORCH_ALLOC_CONF`, and its older name `PYTORCH_CUDA_ALLOC_CONF`, read as PyTorch reads them.

The syntax is that of `c10/core/AllocatorConfig.cpp`: `key:value` pairs with commas between them, and a list in brackets
for divisions by size, `roundup_power2_divisions:[256:1,512:2,>:8]`.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from memfit.allocator.caching import check_options
from memfit.core.errors import BadInput
from memfit.core.replay import AllocatorOptions
from memfit.core.units import MIB

_NAME = "PYTORCH_ALLOC_CONF"
# A pair; its value may be a list in brackets, which has commas and colons of its own.
_PAIR = re.compile(r"([^,:\[\]]+):(\[[^\[\]]*\]|[^,:\[\]]+)")
_FLAGS = {"True": True, "False": False}


def parse_options(text: str, report: Callable[[str], None] = lambda text: None) -> AllocatorOptions:
    """The settings that a value of `PYTORCH_ALLOC_CONF` means.

    Args:
        text: what the variable holds; "" means the defaults.
        report: takes a sentence for each setting that isn't simulated, or only roughly.

    >>> parse_options("expandable_segments:True,max_split_size_mb:128").max_split_size_bytes // MIB
    128
    """
    options = AllocatorOptions()
    for key, value in _pairs(text):
        if key == "expandable_segments":
            if value not in _FLAGS:
                raise _refuse(key, value, "True or False")
            options = replace(options, expandable_segments=_FLAGS[value])
        elif key == "max_split_size_mb":
            options = replace(options, max_split_size_bytes=_whole_number(key, value) * MIB)
        elif key == "garbage_collection_threshold":
            try:
                threshold = float(value)
            except ValueError:
                threshold = 0.0
            if not 0 < threshold < 1:
                raise _refuse(key, value, "a number between 0 and 1")
            options = replace(options, garbage_collection_threshold=threshold)
        elif key == "roundup_power2_divisions":
            options = replace(options, roundup_power2_divisions=_divisions(key, value, report))
        elif (key, value) != ("backend", "native"):
            report(f"{key}:{value} of {_NAME} isn't simulated; the default was assumed")
    check_options(options)
    return options


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    text = text.replace(" ", "")
    position = 0
    while position < len(text):
        match = _PAIR.match(text, position)
        if match is None or (match.end() < len(text) and text[match.end()] != ","):
            raise BadInput(
                f"{_NAME} can't be read from {text[position:]!r} on. "
                f"Write key:value pairs with commas between them, such as expandable_segments:True."
            )
        yield match[1], match[2]
        position = match.end() + 1


def _refuse(key: str, value: str, expected: str) -> BadInput:
    return BadInput(f"{key} in {_NAME} must be {expected}, but {value!r} was given.")


def _whole_number(key: str, value: str) -> int:
    if not value.isascii() or not value.isdigit():
        raise _refuse(key, value, "a whole number")
    return int(value)


def _divisions(key: str, value: str, report: Callable[[str], None]) -> int:
    """One number for all sizes: of a list, that which rounds most, because a list isn't simulated."""
    if not value.startswith("["):
        return _whole_number(key, value)
    numbers = []
    for entry in value[1:-1].split(","):
        size, _, written = entry.partition(":")
        if size != ">" and not (size.isascii() and size.isdigit()):
            raise _refuse(key, value, "a number or a list such as [256:1,512:2,>:8]")
        number = _whole_number(key, written)
        check_options(AllocatorOptions(roundup_power2_divisions=number))
        numbers.append(number)
    # 0 and 1 turn rounding off; of the others the smallest has the widest steps.
    rounding = [number for number in numbers if number > 1]
    chosen = min(rounding, default=0)
    if len(set(numbers)) > 1:
        report(f"{key}:{value} of {_NAME} was taken as {key}:{chosen} for all sizes, which rounds most")
    return chosen

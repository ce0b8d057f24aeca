"""From what people call a device to its row.

Names are compared without case, punctuation and the words that tell no two devices apart, so "RTX 3090", "rtx3090"
and "NVIDIA GeForce RTX 3090" are one name. A size at the end picks the variant with that memory. What is no device
but a size, such as "24GiB", is a device of which only the capacity is known.
"""

import difflib
import re
import sys
from dataclasses import replace
from functools import cache

from memfit.catalogue.host import host_memory_bytes
from memfit.catalogue.rows import DeviceRow, assume_context_bytes, read_instances, read_rows
from memfit.catalogue.stacks import on_stack
from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import InvalidSize, UnknownDevice
from memfit.core.stack import Stack
from memfit.core.units import GIB, looks_like_size, parse_size

_ADVICE = "Run `memfit devices` for the list, or give a size such as 24GiB."

_MAX_NAME_LENGTH = 80
_MAX_GENERIC_BYTES = 1024**5

# A device known only by its size is taken for a GA102 such as the RTX 3090's.
_GENERIC_CAPABILITY = (8, 6)
_GENERIC_MULTIPROCESSORS = 82

_NOISE = {"nvidia", "geforce", "tesla", "quadro", "apple", "gpu", "generation", "edition"}
_NOISE |= {"blackwell", "workstation", "server", "tensor", "core", "graphics", "card"}
# Dropped only when the name isn't known with them: an H100 PCIe is another device than an H100 SXM.
_FORM_FACTOR = re.compile(r"sxm\d?|pcie|hbm\d?e?|gddr\d?x?")
_VENDOR_PREFIX = re.compile(r"(?:nvidia|geforce|tesla|apple)+(?=.)")
_SERIES_PREFIX = re.compile(r"[rg]tx(?=\d{4})")
# Of AWS, and of SageMaker with "ml." before it: "g5.xlarge", "p6-b200.48xlarge".
_INSTANCE = re.compile(r"(?:ml\.)?([a-z][a-z0-9-]*)\.(?:\d*xlarge|metal)")
_MEMORY_WORD = re.compile(r"(\d{1,4})gi?b")


def list_devices() -> tuple[Device, ...]:
    """Every device of the catalogue. Memory that the machine in hand decides is None."""
    return tuple(row.device for row in read_rows())


def find_device(text: str, *, stack: str | Stack | None = None) -> Device:
    """The device that `text` names, or a device of that size.

    Args:
        text: a name in any spelling ("rtx-3090", "NVIDIA A100-SXM4-40GB"), a size ("24GiB"), "cpu", or a type of AWS
            instance ("g5.xlarge"), which names one of its devices.
        stack: the software that runs on it, "torch2.4-cu124"; what is installed by default.

    Raises:
        UnknownDevice: nothing is called that; the message names what comes nearest.
        InvalidSize: a size of zero, or beyond any device.
        BadInput: there is no such stack; the message names what comes nearest.

    >>> find_device("NVIDIA GeForce RTX 3090").name, find_device("A100 80GB").name, find_device("a100").name
    ('rtx-3090', 'a100-80gb', 'a100-40gb')
    >>> find_device("g5.xlarge").name
    'a10g'
    >>> find_device("24 GiB").usable_bytes == 24 * 1024**3
    True
    """
    if len(text) > _MAX_NAME_LENGTH:
        raise UnknownDevice(f"no device has a name of {len(text)} characters ({text[:20]!r}...). {_ADVICE}")
    # Bare numbers are names ("3090"), never sizes: nobody means a device of 3090 bytes.
    if looks_like_size(text) and re.search("[a-z]", text, re.IGNORECASE):
        return on_stack(_generic(text), stack)
    instance = _INSTANCE.fullmatch(text.strip().lower())
    words = _split(read_instances().get(instance[1], text) if instance else text)
    device = _find_words(words) or _find_words([word for word in words if not _FORM_FACTOR.fullmatch(word)])
    if device is None:
        raise UnknownDevice(_explain_unknown(text, words))
    return on_stack(_fill_host_memory(device), stack)


def _split(text: str) -> list[str]:
    """The words of a name that tell devices apart, a memory size as one word.

    >>> _split("NVIDIA RTX PRO 6000 (96 GB)")
    ['rtx', 'pro', '6000', '96gb']
    """
    joined = re.sub(r"(?<![a-z0-9])(\d{1,4})[\s_-]*(gi?b)\b", r"\1\2", text.lower())
    return [word for word in re.findall(r"[a-z0-9]+", joined) if word not in _NOISE]


def _squeeze(words: list[str]) -> str:
    return _SERIES_PREFIX.sub("", _VENDOR_PREFIX.sub("", "".join(words)))


@cache
def _index() -> dict[str, tuple[DeviceRow, ...]]:
    """Rows by squeezed name, the preferred one first."""
    index: dict[str, list[DeviceRow]] = {}
    for row in read_rows():
        names = [_split(name) for name in (row.device.name, row.device.title, *row.aliases)]
        # The name without its memory belongs to every variant; the order of the file says which is preferred.
        bare = [[word for word in words if not _MEMORY_WORD.fullmatch(word)] for words in names]
        for key in dict.fromkeys(map(_squeeze, names + bare)):
            index.setdefault(key, []).append(row)
    return {key: tuple(rows) for key, rows in index.items()}


def _find_words(words: list[str]) -> Device | None:
    if not words:
        return None
    exact = _index().get(_squeeze(words))
    if exact:
        return exact[0].device
    memory = _MEMORY_WORD.fullmatch(words[-1])
    if memory is None:
        return None
    size_gb = int(memory[1])
    nominal_bytes = size_gb * GIB
    for row in _index().get(_squeeze(words[:-1]), ()):
        device = row.device
        if device.kind is Kind.HOST and device.name != "cpu" and nominal_bytes:
            # It shares the memory of a machine that has this much of it.
            return replace(
                device,
                name=f"{device.name}-{size_gb}gb",
                title=f"{device.title}, {size_gb} GB",
                nominal_bytes=nominal_bytes,
                usable_bytes=nominal_bytes,
            )
        if device.nominal_bytes == nominal_bytes:
            return device
    return None


def _fill_host_memory(device: Device) -> Device:
    """The device with this machine's memory, where it is one that this machine can be."""
    is_here = device.name == "cpu" or sys.platform == "darwin"
    if device.kind is not Kind.HOST or device.usable_bytes is not None or not is_here:
        return device
    size_bytes = host_memory_bytes()
    origin = Origin.ASSUMED if size_bytes is None else Origin.MEASURED
    return replace(device, nominal_bytes=size_bytes, usable_bytes=size_bytes, usable_origin=origin)


def _generic(text: str) -> Device:
    size_bytes = parse_size(text)
    if size_bytes > _MAX_GENERIC_BYTES:
        raise InvalidSize(f"no device has {text.strip()!r} of memory. Write the size of one device, such as 24GiB.")
    number, letters = re.sub(r"[^\d.]", "", text), re.sub(r"[\d.\s]", "", text)
    unit = letters.upper().replace("IB", "iB")
    return Device(
        name=number + unit,
        title=f"A CUDA device with {number} {unit}",
        kind=Kind.CUDA,
        nominal_bytes=size_bytes,
        usable_bytes=size_bytes,
        usable_origin=Origin.ASSUMED,
        capability=_GENERIC_CAPABILITY,
        context_bytes=assume_context_bytes(_GENERIC_CAPABILITY, _GENERIC_MULTIPROCESSORS),
        source="the size that was asked for; compute capability and context of an RTX 3090",
    )


def _explain_unknown(text: str, words: list[str]) -> str:
    key = _squeeze(words)
    near = difflib.get_close_matches(key, _index(), n=5, cutoff=0.6) if key else []
    names = list(dict.fromkeys(_index()[match][0].device.name for match in near))[:3]
    nearest = f" The nearest: {', '.join(names)}." if names else ""
    return f"no device is called {text.strip()!r}.{nearest} {_ADVICE}"

"""The software stack of a run: the versions of PyTorch, CUDA and the libraries that decide what a step allocates.

What a step needs changes from release to release: optimizers loop or don't, kernels are loaded all at once or as they
are called, formulas of autograd save other tensors. A rule that depends on a version asks the stack of the device:
`stack.torch >= (2, 11)`, or `since(stack.torch, table)` where a value changed with releases.

Which builds exist: the release compatibility matrix in PyTorch's RELEASE.md, the CUDA version that PyPI has first.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from memfit.core.errors import BadInput
from memfit.core.shown import Shown
from memfit.core.typed_data import Count

Version = tuple[Count, ...]
"""A version by its numbers, so that versions compare: (2, 4) < (2, 4, 1) < (2, 11)."""
_Value = TypeVar("_Value")

_BUILDS: Mapping[Version, Sequence[Version]] = {
    (1, 8): ((10, 2), (11, 1)),
    (1, 9): ((10, 2), (11, 1)),
    (1, 10): ((10, 2), (11, 1), (11, 3)),
    (1, 11): ((10, 2), (11, 3), (11, 5)),
    (1, 12): ((10, 2), (11, 3), (11, 6)),
    (1, 13): ((11, 7), (11, 6)),
    (2, 0): ((11, 7), (11, 8)),
    (2, 1): ((12, 1), (11, 8)),
    (2, 2): ((12, 1), (11, 8)),
    (2, 3): ((12, 1), (11, 8)),
    (2, 4): ((12, 1), (11, 8), (12, 4)),
    (2, 5): ((12, 4), (11, 8), (12, 1)),
    (2, 6): ((12, 4), (11, 8), (12, 6)),
    (2, 7): ((12, 6), (11, 8), (12, 8)),
    (2, 8): ((12, 8), (12, 6), (12, 9)),
    (2, 9): ((12, 8), (12, 6), (13, 0)),
    (2, 10): ((12, 8), (12, 6), (13, 0)),
    (2, 11): ((13, 0), (12, 6), (12, 8)),
    (2, 12): ((13, 0), (12, 6), (13, 2)),
    (2, 13): ((13, 0), (12, 6), (13, 2)),
}

_NAMES = {"pytorch": "torch", "cu": "cuda", "bnb": "bitsandbytes", "hf": "transformers", "nvidia": "driver"}
_PART = re.compile(r"([a-z]*)[=v]*([0-9][0-9.]*)")
_EXAMPLES = {"torch": "torch2.4", "cuda": "cu124"}
_MAX_LENGTH = 120
_ADVICE = "Write torch2.4-cu124, or torch2.1-cu121-transformers4.36-peft0.7-bitsandbytes0.41."


@dataclass(frozen=True, slots=True, repr=False)
class Stack(Shown):
    """Versions of the software that a step runs on.

    Args:
        torch: of PyTorch, (2, 4) or (2, 4, 1).
        cuda: that PyTorch was built for; None where it was built without.
        transformers: of that library; None where unknown, or not installed.
        peft: the same.
        bitsandbytes: the same.
        driver: of NVIDIA's driver; None where unknown.
        is_installed: whether it is what is installed here, rather than what was asked for.
    """

    torch: Version
    cuda: Version | None = None
    transformers: Version | None = None
    peft: Version | None = None
    bitsandbytes: Version | None = None
    driver: Version | None = None
    is_installed: bool = field(default=False, kw_only=True)

    @property
    def device_cuda(self) -> Version:
        """The CUDA version that a simulated device runs: that of PyPI's build where PyTorch here has none."""
        return self.cuda or default_cuda(self.torch)

    @property
    def frees_gradients(self) -> bool:
        """Whether `optimizer.zero_grad()` frees gradients where nobody says otherwise (torch/optim/optimizer.py)."""
        return self.torch >= (2, 0)

    @property
    def text(self) -> str:
        """The stack as `read_stack` reads it."""
        cuda = "" if self.cuda is None else f"-cu{''.join(map(str, self.cuda[:2]))}"
        return f"torch{_dotted(self.torch)}{cuda}" + "".join(f"-{name}{version}" for name, version in self._others())

    def described(self, *, on_cuda: bool = True) -> tuple[str, str]:
        """(the versions in words, whether they are the installed ones)."""
        cuda = f", CUDA {_dotted(self.device_cuda)}" if on_cuda else ""
        # Of what is installed, the libraries are in the JSON: a model may use none of them.
        others = "" if self.is_installed else "".join(f", {name} {version}" for name, version in self._others())
        origin = "installed" if self.is_installed else "as asked"
        assumed = ", CUDA assumed" if on_cuda and self.cuda is None else ""
        return f"PyTorch {_dotted(self.torch)}{cuda}{others}", origin + assumed

    def summary(self) -> str:
        """The versions, and whether they are the installed ones."""
        return "{} ({})".format(*self.described())

    def _others(self) -> list[tuple[str, str]]:
        given = ((name, getattr(self, name)) for name in _PARTS if name not in ("torch", "cuda"))
        return [(name, _dotted(version)) for name, version in given if version]


_PARTS = tuple(field.name for field in fields(Stack) if field.name != "is_installed")


def read_stack(text: str | Stack) -> Stack:
    """The stack that a text names.

    Args:
        text: "torch2.4-cu124", or as pip writes it, "torch==2.4.1+cu124". Without CUDA, that of PyPI's build;
            transformers, peft, bitsandbytes and driver may follow, "torch2.1-cu121-peft0.7".

    Raises:
        BadInput: there is no such stack; the message names the nearest.

    >>> read_stack("torch2.4-cu124").cuda, read_stack("torch2.4-cu124").torch >= (2, 11), read_stack("torch2.6").text
    ((12, 4), False, 'torch2.6-cu124')
    """
    if isinstance(text, Stack):
        return text
    if not isinstance(text, str):
        raise BadInput(f"a stack is a text such as 'torch2.4-cu124', but {text!r} was given.")
    if len(text) > _MAX_LENGTH:
        raise BadInput(f"no stack has a name of {len(text)} characters ({text[:20]!r}...). {_ADVICE}")
    versions: dict[str, Version] = {}
    for word in filter(None, re.split(r"[-+,\s]+", text.strip().lower())):
        name, version = _read_part(word, text)
        if name in versions:
            raise BadInput(f"the stack {text!r} names {name} twice. {_ADVICE}")
        versions[name] = version
    if "torch" not in versions:
        raise BadInput(f"the stack {text!r} names no version of PyTorch. {_ADVICE}")
    stack = Stack(versions["torch"], *map(versions.get, _PARTS[1:]))
    builds = builds_of(stack.torch)
    if not builds:
        raise BadInput(
            f"no stack with PyTorch {_dotted(stack.torch)} is known; the nearest: {_nearest(stack).text}. "
            f"Known are PyTorch {_dotted(min(_BUILDS))} to {_dotted(max(_BUILDS))}."
        )
    if stack.cuda is None:
        return replace(stack, cuda=builds[0])
    if stack.cuda[:2] not in builds:
        raise BadInput(
            f"PyTorch {_dotted(stack.torch)} was not built for CUDA {_dotted(stack.cuda)}; "
            f"the nearest: {_nearest(stack).text}. It was for CUDA {', '.join(map(_dotted, sorted(builds)))}."
        )
    return stack


def read_version(text: str) -> Version:
    """The numbers that a version begins with, without zeros in front and what follows them.

    >>> read_version("2.13.0a0+cpu"), read_version("unknown")
    ((2, 13, 0), ())
    """
    match = re.match(r"\d+(\.\d+)*", text.strip())
    return tuple(map(int, match[0].split("."))) if match else ()


def builds_of(torch: Version) -> Sequence[Version]:
    """CUDA versions that a release of PyTorch was built for, that of PyPI first; none of a release that isn't known."""
    return _BUILDS.get(torch[:2], ())


def default_cuda(torch: Version) -> Version:
    """The CUDA version of PyPI's build of a release of PyTorch; of the newest known one where it is newer."""
    return since(torch, {release: builds[0] for release, builds in _BUILDS.items()})


def since(version: Version, table: Mapping[Version, _Value]) -> _Value:
    """The value that holds for a version, from a table of values by the version that brought them.

    Versions older than all have the oldest value.

    >>> since((1, 12, 1), {(0,): "loop", (2, 0): "foreach"}), since((2, 0, 1), {(0,): "loop", (2, 0): "foreach"})
    ('loop', 'foreach')
    """
    return table[max((first for first in table if first <= version), default=min(table))]


def _read_part(word: str, text: str) -> tuple[str, Version]:
    match = _PART.fullmatch(word)
    given = match[1] if match else re.sub(r"[^a-z].*", "", word)
    # A bare number is the version of PyTorch, as in "2.4.0+cu124".
    name = _NAMES.get(given, given or "torch")
    if name not in _PARTS:
        close = difflib.get_close_matches(name, _PARTS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else f" It may name {', '.join(_PARTS)}."
        raise BadInput(f"{word!r} in the stack {text!r} is no software that it can name.{hint} {_ADVICE}")
    version = read_version(match[2].strip(".")) if match else ()
    if given == "cu" and len(version) == 1 and version[0] >= 10:
        # "124" is 12.4.
        version = divmod(version[0], 10)
    if len(version) < 2 and name in ("torch", "cuda"):
        raise BadInput(f"{word!r} in the stack {text!r} has no version such as {_EXAMPLES[name]}. {_ADVICE}")
    if not version or max(version) >= 10**6:
        raise BadInput(f"{word!r} in the stack {text!r} has no version that can be read. {_ADVICE}")
    return name, version


def _nearest(stack: Stack) -> Stack:
    """The known stack that comes nearest in the version of PyTorch, then in that of CUDA."""
    release = min(_BUILDS, key=lambda known: abs(_position(known) - _position(stack.torch)))
    cuda = stack.cuda or _BUILDS[release][0]
    return Stack(release, min(_BUILDS[release], key=lambda known: abs(_position(known) - _position(cuda))))


def _position(version: Version) -> int:
    """Where a release lies among others."""
    return 100 * version[0] + version[1]


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))

"""What a device is: memory, rates, and how sure we are of each."""

from dataclasses import dataclass, field
from enum import StrEnum

from memfit.core.printing import printable
from memfit.core.shown import Shown
from memfit.core.stack import Stack
from memfit.core.units import format_size


class Origin(StrEnum):
    """Where a number shown to a user comes from."""

    MEASURED = "measured"
    SIMULATED = "simulated"
    ASSUMED = "assumed"


class Kind(StrEnum):
    """Whose rules a device follows."""

    CUDA = "cuda"
    HOST = "host"
    """Plain host memory: a CPU, or an accelerator that shares it."""


@dataclass(frozen=True, slots=True, repr=False)
class Device(Shown):
    """A device of the catalogue.

    Args:
        name: canonical name, "rtx-3090".
        title: name as its maker writes it.
        kind: whose rules it follows.
        nominal_bytes: what the box says; None when the caller's machine decides.
        usable_bytes: what a process can really get, before its CUDA context.
        usable_origin: how `usable_bytes` is known.
        capability: CUDA compute capability (8, 6), or None.
        num_multiprocessors: streaming multiprocessors, or None.
        bandwidth_bytes_per_second: memory bandwidth.
        cache_bytes: second-level cache, or None where unknown.
        flops: peak dense floating-point operations per second by dtype ("float32", "tf32", "float16", "bfloat16",
            "float8").
        context_bytes: memory that the CUDA context takes in a process, or None where unknown.
        context_origin: how `context_bytes` is known.
        source: where the figures come from.
        date: when that source was read, ISO.
        stack: versions of the software that runs on it; None means what is installed.
    """

    name: str
    title: str
    kind: Kind
    nominal_bytes: int | None
    usable_bytes: int | None
    usable_origin: Origin
    capability: tuple[int, int] | None = None
    num_multiprocessors: int | None = None
    bandwidth_bytes_per_second: float | None = None
    flops: dict[str, float] = field(default_factory=dict)
    context_bytes: int | None = None
    context_origin: Origin = Origin.ASSUMED
    source: str = ""
    date: str = ""
    stack: Stack | None = None
    cache_bytes: int | None = None

    def summary(self) -> str:
        """Its names, and the memory a process can get."""
        usable = "memory unknown" if self.usable_bytes is None else f"{format_size(self.usable_bytes)} usable"
        origin = "" if self.usable_bytes is None else f" ({self.usable_origin.value})"
        return f"{self.name}: {self.title}, {usable}{origin}"

    def __str__(self) -> str:
        details = [printable(self.summary())]
        if self.nominal_bytes is not None:
            details.append(f"{format_size(self.nominal_bytes)} nominal")
        if self.capability is not None:
            details.append(f"compute capability {self.capability[0]}.{self.capability[1]}")
        if self.bandwidth_bytes_per_second is not None:
            details.append(f"{format_size(round(self.bandwidth_bytes_per_second))}/s")
        if self.stack is not None:
            details.append(self.stack.described(on_cuda=self.kind is Kind.CUDA)[0])
        return ", ".join(details)

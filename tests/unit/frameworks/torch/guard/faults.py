"""Memory that runs out where a test says so: made up, or for real.

Both are dispatch modes. A mode that was entered earlier lies below one that is entered later, so `with faults(...)`
around the code under test makes operators fail below the mode that retries them, as a real allocator would.
"""

import ctypes
from collections.abc import Collection, Mapping
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

try:
    import resource
except ImportError:  # Windows
    resource = None

ALWAYS = range(2**31)
"""Every operator fails."""


def from_now_on(index):
    """Indices of all operators from `index` on: memory that ran out for good."""
    return range(index, 2**31)


def allocation_error(size_bytes=1 << 30):
    """The very error of PyTorch's CPU allocator."""
    return RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        f"allocate {size_bytes} bytes. Error code 12 (Cannot allocate memory)"
    )


class Faults(TorchDispatchMode):
    """Counts operators per phase and makes some of them fail before they do anything.

    Args:
        schedule: for each phase the indices of the calls that fail, from 0. A call that is repeated has the next index,
            so {3} fails once and {3, 4} fails again when it is retried.
        every_operator: count all operators, also those that only write in place (they may need temporaries); otherwise
            only those that make new tensors.

    Attributes:
        phase: what runs now, set by the test; "" at first. Counts go on when a phase comes again; `begin` starts anew.
        counts: operators counted in each phase.
        raised: (phase, index, operator's name) of each failure.
    """

    def __init__(self, schedule: Mapping[str, Collection[int]], *, every_operator: bool = False):
        super().__init__()
        self.schedule = dict(schedule)
        self.every_operator = every_operator
        self.phase = ""
        self.counts: dict[str, int] = {}
        self.raised: list[tuple[str, int, str]] = []
        self.names: list[str] = []

    def begin(self, phase):
        """Enters `phase` and counts its operators from 0."""
        self.phase = phase
        self.counts[phase] = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "profiler" and (self.every_operator or makes_tensors(func)):
            index = self.counts.get(self.phase, 0)
            self.counts[self.phase] = index + 1
            if index in self.schedule.get(self.phase, ()):
                self.raised.append((self.phase, index, str(func)))
                raise allocation_error()
        return func(*args, **(kwargs or {}))


@contextmanager
def faults(schedule, *, phase="", every_operator=False):
    """Has operators fail by `schedule`: a mapping of phases, or just indices for the one phase "".

    >>> with faults({2}) as injected:  # doctest: +SKIP
    ...     train()
    """
    schedule = schedule if isinstance(schedule, Mapping) else {"": schedule}
    injected = Faults(schedule, every_operator=every_operator)
    injected.phase = phase
    with injected:
        yield injected


def makes_tensors(operator):
    """Whether an operator returns a tensor that is no view and none of its arguments."""
    schema = getattr(operator, "_schema", None)
    return schema is None or any("Tensor" in str(made.type) and made.alias_info is None for made in schema.returns)


class RealPressure(TorchDispatchMode):
    """Takes the process's memory away at one operator: from then on real allocations really fail.

    Args:
        at: index of the operator, from 0, before which the soft RLIMIT_DATA is lowered; None: by calling `press`.
        headroom_bytes: what may still be taken then.
    """

    def __init__(self, at=None, headroom_bytes=1 << 20):
        super().__init__()
        self.at = at
        self.headroom_bytes = headroom_bytes
        self.count = 0
        self._limits = None
        # M_MMAP_THRESHOLD: otherwise the heap keeps what was freed before, and large tensors are taken from there.
        ctypes.CDLL(None).mallopt(-3, 1 << 16)

    def press(self):
        """Lowers the limit to what is taken now and the headroom."""
        # The heap's free space would hide the limit.
        ctypes.CDLL(None).malloc_trim(0)
        self._limits = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + self.headroom_bytes, self._limits[1]))

    def lift(self):
        """Gives the memory back."""
        if self._limits is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self._limits)
            self._limits = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "profiler":
            if self.count == self.at:
                self.press()
            self.count += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def real_pressure(at=None, headroom_bytes=1 << 20):
    """A limit on the process's memory from the operator `at` on, lifted at the end or by `.lift()`; Linux only.

    Call `pressure.lift` in `oom.release` for memory that is there again when asked for. Run this in a process
    of its own: whatever else allocates meanwhile fails as well.
    """
    pressure = RealPressure(at, headroom_bytes)
    try:
        with pressure:
            yield pressure
    finally:
        pressure.lift()


def data_bytes():
    """Private writable memory of this process, which is what RLIMIT_DATA limits."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))


def state_of(optimizer):
    """Everything that an update changes, as (name, value) pairs to compare."""
    found = []
    for index, group in enumerate(optimizer.param_groups):
        found.extend((f"{index}.{name}", value) for name, value in group.items() if name != "params")
        for number, parameter in enumerate(group["params"]):
            found.append((f"{index}.{number}", parameter.detach().clone()))
            for name, value in optimizer.state.get(parameter, {}).items():
                found.append((f"{index}.{number}.{name}", value.clone() if torch.is_tensor(value) else value))
    return found


def differences(left, right):
    """Names of what isn't bit-equal in two results of `state_of`."""
    if [name for name, _ in left] != [name for name, _ in right]:
        return ["other names: " + str({name for name, _ in left} ^ {name for name, _ in right})]
    return [name for (name, a), (_, b) in zip(left, right, strict=True) if not _are_equal(a, b)]


def _are_equal(a, b):
    return torch.equal(a, b) if torch.is_tensor(a) and torch.is_tensor(b) else type(a) is type(b) and a == b

"""A mode that has one operation of many run out of memory."""

from torch.utils._python_dispatch import TorchDispatchMode

MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "1000 bytes. Error code 12 (Cannot allocate memory)"
)


class Failing(TorchDispatchMode):
    """Fails once, at the operation of this number; `late` after it has run, as one does that runs out at its end."""

    def __init__(self, number, *, late=False):
        super().__init__()
        self.number = number
        self.late = late
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        position = len(self.seen)
        self.seen.append(str(func))
        if position == self.number and not self.late:
            raise RuntimeError(MESSAGE)
        result = func(*args, **(kwargs or {}))
        if position == self.number and not self._has_written(func):
            raise RuntimeError(MESSAGE)
        return result

    @staticmethod
    def _has_written(func):
        # A pointwise operation gets all its memory before it writes.
        name = str(func)
        return "_." in name and not any(part in name for part in ("bernoulli_", "fill_", "copy_", "zero_"))

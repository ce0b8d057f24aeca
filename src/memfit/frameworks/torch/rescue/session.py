"""The rescue of a process: hooks and mode while they may be needed, nothing while memory suffices.

Armed, autograd hands every tensor it saves to the shelf (saved.py) and every operation passes a mode (retry.py). Both
cost microseconds for each tensor and operation, so after the first steps they are taken off if the process has needed
clearly less than it may have, and put on again when it comes close. Steps are counted where optimizers update.

Hooks and modes are stacks of a thread, which a script may push on too. They are changed only in the thread that
enabled the rescue, and only while nobody else's is on top.

How much a process has needed is read once a step. Host memory: the greatest resident size so far (VmHWM) is known to
the kernel, the greatest amount of private data, which RLIMIT_DATA limits, is not: it is taken as the present amount
(VmData) plus what has been resident at most and isn't any more (VmHWM - VmRSS). The kernel's peak is not reset between
steps, since that would spoil the peak that the script itself, or whoever waits for it, reads; so the share only ever
grows. Devices: what the caching allocator has reserved, which stays at about its peak.
"""

import atexit
import contextlib
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memfit.core import heap
from memfit.core.errors import BadFile
from memfit.core.guarding import MemoryFailure, Where
from memfit.core.own_memory import STATUS, limits, read_sizes
from memfit.core.progress import announce
from memfit.core.run_events import note
from memfit.core.units import format_size
from memfit.frameworks.torch import internals, oom
from memfit.frameworks.torch.rescue import copies
from memfit.frameworks.torch.rescue.retry import Retrying, rerun
from memfit.frameworks.torch.rescue.saved import Shelf

CLOSE_SHARE = 0.8  # from this share of its memory on, a process is close to running out

_FIRST_STEPS = 3
# Little steps would mean many failures for one large operation; larger ones, more moved than is needed.
_LEAST_FREED_BYTES = 32 * 1024**2
# What the handling of a failure itself may need.
_BALLAST_BYTES = 4 * 1024**2


class Rescue:
    """Rescues this thread's loop from running out of memory until `close`, or for a block; see `memfit.rescue`."""

    def __init__(self, *, eager: bool = False, limit_bytes: int | None = None, folder: str | None = None) -> None:
        self._folder: Path | None = None
        try:
            self._folder = copies.choose_folder(folder)
        except BadFile:
            # Activations of a device need no folder.
            if folder is not None or not torch.cuda.is_available():
                raise
        self._limit_bytes = limit_bytes or psutil.virtual_memory().total
        bring_back = partial(rerun, make_room=self._make_room, name="saved activation", count=self._count)
        self._shelf = Shelf(self._make_copy, bring_back, eager=eager)
        self._mode = Retrying(self._make_room, self._count)
        self._eager = eager
        self._owner = (os.getpid(), threading.get_ident())
        self._has_hooks = False
        self._has_mode = False
        self._num_steps = 0
        self._ballast: bytearray | None = bytearray(_BALLAST_BYTES)
        self._has_released = False
        self._said: set[str] = set()
        self.num_retried = 0  # operations that ran out of memory and were run again
        self._handle = register_optimizer_step_post_hook(self._after_step)
        # Transformations such as torch.func.grad refuse to run while there are hooks.
        self._disable_hooks = torch.autograd.graph.disable_saved_tensors_hooks
        torch.autograd.graph.disable_saved_tensors_hooks = self._step_aside
        atexit.register(self._sum_up)
        # Whoever enables it inside of other hooks and modes closes it there too.
        self._push_hooks()
        self._push_mode()

    def __enter__(self) -> "Rescue":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_armed(self) -> bool:
        """Whether saved tensors and operations are watched."""
        return self._has_mode

    @property
    def moved_bytes(self) -> int:
        """Bytes of saved activations that were moved away so far."""
        return self._shelf.moved_bytes

    def arm(self) -> None:
        """Watches from now on, unless somebody else's hooks or modes are in charge at the moment."""
        if not self._is_owner():
            return
        if not self._has_hooks and internals.top_saved_tensors_hooks(False) is None:
            self._push_hooks()
        if not self._has_mode and internals.current_dispatch_mode() is None:
            self._push_mode()

    def disarm(self) -> None:
        """Watches no more, unless somebody else's hooks or modes are on top; what is saved stays saved."""
        if not self._is_owner():
            return
        if self._has_mode and internals.current_dispatch_mode() is self._mode:
            self._mode.__exit__(None, None, None)
            self._has_mode = False
            heap.map_large_blocks(False)
        self._pop_hooks()

    def close(self) -> None:
        """Ends the rescue; activations that wait still come back when they are needed."""
        self.disarm()
        torch.autograd.graph.disable_saved_tensors_hooks = self._disable_hooks
        self._handle.remove()
        atexit.unregister(self._sum_up)
        self._sum_up()

    def _push_mode(self) -> None:
        heap.map_large_blocks(True)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._has_mode = True

    def _push_hooks(self) -> None:
        internals.push_saved_tensors_hooks(self._shelf.pack, self._shelf.unpack)
        self._has_hooks = True

    def _pop_hooks(self) -> bool:
        """Takes the hooks off if they are on top; whether they were."""
        hooks = internals.top_saved_tensors_hooks(False) if self._has_hooks and self._is_owner() else None
        if hooks is None or getattr(hooks[0], "__self__", None) is not self._shelf:
            return False
        internals.pop_saved_tensors_hooks()
        self._has_hooks = False
        return True

    @contextlib.contextmanager
    def _step_aside(self, error_message: str) -> Iterator[None]:
        """PyTorch's `disable_saved_tensors_hooks`, with these hooks taken off meanwhile."""
        had_hooks = self._pop_hooks()
        try:
            with self._disable_hooks(error_message):
                yield
        finally:
            if had_hooks:
                self._push_hooks()

    def _after_step(self, *_: Any) -> None:
        self._num_steps += 1
        if self._eager or self._num_steps < _FIRST_STEPS:
            return
        is_close = self.num_retried > 0 or peak_share(self._limit_bytes) >= CLOSE_SHARE
        if is_close and not (self._has_mode and self._has_hooks):
            self.arm()
        elif not is_close and (self._has_mode or self._has_hooks):
            self.disarm()

    def _make_room(self, failure: MemoryFailure, num_failures: int, name: str) -> bool:
        """Moves saved activations away, the more the more often the operation has failed; False if nothing was left."""
        self._ballast = None
        size = "" if failure.requested_bytes is None else f" ({format_size(failure.requested_bytes)} asked for)"
        place = f"files in {self._folder}" if failure.where is Where.HOST else "host memory"
        if self._say("first", f"memory ran out in {name}{size}; saved activations move to {place}"):
            note("rescue", operation=name, requested_bytes=failure.requested_bytes, where=str(failure.where))
        wanted = max(failure.requested_bytes or 0, _LEAST_FREED_BYTES) << min(num_failures, 10)
        try:
            freed = self._shelf.free(wanted, on_host=failure.where is Where.HOST)
        except OSError as error:
            self._say("disk", f"activations can't be moved any more: {error.strerror or error} ({self._folder})")
            return False
        if num_failures == 0:
            self._has_released = False
        if freed:
            heap.give_back()
        elif self._has_released:
            return False
        else:
            # The last chance: cycles of dead objects may hold tensors.
            self._has_released = True
            oom.release()
        return True

    def _count(self) -> None:
        self.num_retried += 1
        # Freed for the handling of a failure; the next one may need it again.
        with contextlib.suppress(MemoryError):
            self._ballast = self._ballast or bytearray(_BALLAST_BYTES)

    def _make_copy(self, storage: torch.UntypedStorage) -> copies.Copy:
        if storage.device.type != "cpu":
            return copies.HostCopy(storage)
        if self._folder is None:
            raise OSError("no folder for files of activations")
        _, space_limit = limits()
        kind = copies.MappedFile if space_limit is None else copies.ReadFile
        return kind(storage, self._folder)

    def _is_owner(self) -> bool:
        return self._owner == (os.getpid(), threading.get_ident())

    def _say(self, key: str, text: str) -> bool:
        if key in self._said:
            return False
        self._said.add(key)
        announce(text, by="memfit rescue")
        return True

    def _sum_up(self) -> None:
        # A process that was forked has inherited this.
        if os.getpid() != self._owner[0] or not (self.num_retried or self.moved_bytes):
            return
        moved = format_size(self.moved_bytes)
        self._say("sum", f"{self.num_retried} operations ran again, {moved} of saved activations were moved away")
        note("rescued", retried=self.num_retried, moved_bytes=self.moved_bytes)


def peak_share(limit_bytes: int, status: Path = STATUS) -> float:
    """The greatest share of any memory, from 0 to 1, by a limit on resident memory; 1 where nothing is known."""
    sizes = read_sizes(status)
    if sizes is None:
        return 1.0
    address_space, peak, resident, data = sizes
    data_limit, space_limit = limits()
    shares = [peak / limit_bytes]
    if data_limit:
        shares.append((data + max(0, peak - resident)) / data_limit)
    if space_limit:
        shares.append(address_space / space_limit)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            total_bytes = torch.cuda.get_device_properties(index).total_memory
            shares.append(torch.cuda.memory_reserved(index) / total_bytes)
    return max(shares)

"""`memfit.simulate`: a device that isn't there, for a few lines of a notebook or a test."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memfit.allocator import memory_of
from memfit.api.devices import resolve
from memfit.api.jobs import on_installed_stack, torch_adapter
from memfit.core.device import Device, Kind
from memfit.core.dryrun import Failure
from memfit.core.errors import BadInput
from memfit.core.estimate import Estimate
from memfit.core.shown import Shown

if TYPE_CHECKING:
    from memfit.frameworks.torch.script.session import Session


class SimulatedDevice(Shown):
    """A device that PyTorch takes for its own while `memfit.simulate` lasts.

    Args:
        session: the simulation behind it.
    """

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._started = time.perf_counter()
        self._result: Estimate | None = None

    def __str__(self) -> str:
        return str(self.estimate())

    def summary(self) -> str:
        """Its name: what it holds changes as it is used."""
        return self.name

    @property
    def name(self) -> str:
        """The name of the device in the catalogue."""
        return self._session.device.name

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Every time that the device was full, in order."""
        return tuple(self._session.failures)

    def estimate(self) -> Estimate:
        """What has been allocated so far: the peak, where it goes, and whether it fits."""
        if self._result is not None:
            return self._result
        session = self._session
        return session.estimate("simulation", time.perf_counter() - self._started, died=session.unrecovered)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes the page of `estimate()`."""
        self.estimate().report(path)


@contextmanager
def simulate(device: str | Device, *, count: int = 1) -> Iterator[SimulatedDevice]:
    """Shows PyTorch a device that is not there: `with memfit.simulate("h100-80gb") as device:`.

    Inside, `torch.cuda` and tensors on "cuda" work, have shapes and no values, and run out of memory where the real
    device would. Afterwards PyTorch is what it was, and models that were moved come back with the values they had.
    Tensors made inside have none and are of no use afterwards.

    Args:
        device: a name of the catalogue ("rtx-3090") or a size ("24GiB").
        count: how many of them PyTorch sees; the memory is that of the first.

    Yields:
        The device, which can be asked for its peak, what holds memory, and a report.
    """
    target = resolve(device)
    if target.kind is not Kind.CUDA:
        raise BadInput(
            f"only CUDA devices can be simulated, but {target.name!r} was given. "
            "Name one, such as 'rtx-3090'; `memfit devices` lists all."
        )
    if count < 1:
        raise BadInput(f"count must be at least 1, but {count} was given.")
    target = on_installed_stack(target, torch_adapter().stack(), "PyTorch")
    from memfit.frameworks.torch.script.session import Session

    memory, configure = memory_of(target)
    session = Session(target, memory, count=count, configure=configure)
    simulated = SimulatedDevice(session)
    with session.visiting():
        try:
            yield simulated
        finally:
            simulated._result = simulated.estimate()

"""`memfit.compare`: several jobs side by side on one device."""

from collections.abc import Iterable

from memfit.api.devices import resolve
from memfit.api.estimate import estimate
from memfit.core.device import Device
from memfit.core.estimate import Estimate
from memfit.core.job import Job
from memfit.core.progress import doing


def compare(
    jobs: Iterable[Job], *, device: str | Device | None = None, batch_size: int | None = None
) -> list[Estimate]:
    """Estimates of several jobs on one device, for a table side by side.

    Args:
        jobs: what to compare; the first is what the others are measured against.
        device: as for `estimate`.
        batch_size: the same for all; each job's own by default.
    """
    target = resolve(device)
    with doing("comparing"):
        return [estimate(job, device=target, batch_size=batch_size) for job in jobs]

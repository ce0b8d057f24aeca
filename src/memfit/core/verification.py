"""The answer of `memfit.verify`: what was measured of the device in hand, and predictions beside measurements.

Saved, it is the calibration of that device: what `memfit.calibrate` writes, and later estimates use.
"""

import os
from dataclasses import dataclass, field, replace
from statistics import geometric_mean
from typing import Any, ClassVar, Self

from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import BadFile
from memfit.core.reporters import Printed, Reporters, written
from memfit.core.typed_data import Count, Saved
from memfit.core.units import format_size


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a device; None where it wasn't.

    Args:
        usable_bytes: what the device has in all.
        context_bytes: what another process on it takes before any tensor, kernels of one product loaded.
        cublas_workspace_bytes: what the first matrix product of a process takes and keeps.
        launch_seconds: between two small kernels, one launched after the other from Python.
        bandwidth_bytes_per_second: read and written by a copy within the device.
        transfer_bytes_per_second: from pinned host memory to the device.
        flops: operations per second of a large matrix product, by the names of `Device.flops`.
    """

    usable_bytes: Count | None = None
    context_bytes: Count | None = None
    cublas_workspace_bytes: Count | None = None
    launch_seconds: float | None = None
    bandwidth_bytes_per_second: float | None = None
    transfer_bytes_per_second: float | None = None
    flops: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """A small training step, predicted and run.

    Args:
        name: what it shows, such as "depthwise convolutions".
        precision: "fp32", "amp-fp16" and so on.
        batch_size: samples of the step.
        predicted_allocated_bytes: greatest sum of live blocks.
        predicted_reserved_bytes: greatest memory of the caching allocator; None on a device without it.
        predicted_seconds: of a step; None where it isn't known.
        measured_allocated_bytes: see above; None where the step could not be run.
        measured_reserved_bytes: see above.
        measured_seconds: see above.
        failure: why the step could not be run, or "".
    """

    name: str
    precision: str
    batch_size: int
    predicted_allocated_bytes: int
    predicted_reserved_bytes: int | None = None
    predicted_seconds: float | None = None
    measured_allocated_bytes: int | None = None
    measured_reserved_bytes: int | None = None
    measured_seconds: float | None = None
    failure: str = ""

    @property
    def allocated_error(self) -> float | None:
        """Error of the predicted allocated peak: 0.01 where it is 1% high."""
        return _error(self.predicted_allocated_bytes, self.measured_allocated_bytes)

    @property
    def reserved_error(self) -> float | None:
        """Error of the predicted reserved peak."""
        return _error(self.predicted_reserved_bytes, self.measured_reserved_bytes)

    @property
    def time_ratio(self) -> float | None:
        """Measured over predicted time of a step."""
        return (
            self.measured_seconds / self.predicted_seconds if self.measured_seconds and self.predicted_seconds else None
        )


def _error(predicted: int | None, measured: int | None) -> float | None:
    return predicted / measured - 1 if predicted is not None and measured else None


@dataclass(frozen=True, slots=True, repr=False)
class Verification(Saved, Printed):
    """A device in hand, measured, and predictions for it beside measurements.

    Args:
        device: as the catalogue knows it, with the stack that was measured.
        origin: of what is called measured here: "simulated" where it was a rehearsal.
        date: when, ISO.
        measured: of the device.
        checks: of steps.
        seconds: that it took.
        num_left_out: steps for which no time was left.
    """

    device: Device
    origin: Origin
    date: str
    measured: Measured
    checks: tuple[ModelCheck, ...]
    seconds: float = 0.0
    num_left_out: int = 0

    reporters: ClassVar = Reporters[Any]()
    saved_as = "verification", "a calibration"
    how_to_get = "Name a file that `memfit calibrate` wrote; where it is kept in memfit's cache folder, remove it."

    def summary(self) -> str:
        """How far predictions were off at most."""
        worst = self.worst_error
        if worst is None:
            return f"of {self.device.title}: nothing could be compared"
        return f"of {self.device.title}: {len(self.compared)} steps, peaks {worst:.1%} off at most"

    @property
    def software(self) -> str:
        """The versions that were measured."""
        stack = self.device.stack
        return "" if stack is None else stack.described(on_cuda=self.device.kind is Kind.CUDA)[0]

    @property
    def compared(self) -> tuple[ModelCheck, ...]:
        """The steps that ran."""
        return tuple(check for check in self.checks if check.measured_allocated_bytes is not None)

    @property
    def worst_error(self) -> float | None:
        """The greatest error of a predicted peak without its sign; None where nothing was compared."""
        errors = [error for one in self.compared for error in (one.allocated_error, one.reserved_error)]
        return max((abs(error) for error in errors if error is not None), default=None)

    @property
    def time_ratio(self) -> float | None:
        """Measured over predicted time of a step, geometric mean; None where no time was predicted."""
        ratios = [check.time_ratio for check in self.checks if check.time_ratio is not None]
        return geometric_mean(ratios) if ratios else None

    def calibrated(self, device: Device) -> Device:
        """The device with what was measured in the place of what the catalogue assumes.

        Raises:
            BadFile: it is another device, or what is called measured was only rehearsed.
        """
        if device.name != self.device.name:
            raise BadFile(
                f"the calibration is of {self.device.title} ({self.device.name}), not of {device.title} "
                f"({device.name}). Run `memfit calibrate` on a machine with that device."
            )
        if self.origin is not Origin.MEASURED:
            raise BadFile(
                f"the calibration of {self.device.title} is a rehearsal: nothing in it was measured. "
                "Run `memfit calibrate` on a machine with that device."
            )
        measured = self.measured
        if device.kind is Kind.CUDA:
            self._check_memory(device)
        changes: dict[str, Any] = {"source": f"measured with memfit calibrate, {self.software}", "date": self.date}
        if measured.usable_bytes is not None and device.kind is Kind.CUDA:
            changes |= {"usable_bytes": measured.usable_bytes, "usable_origin": Origin.MEASURED}
        # Another release loads other kernels.
        same_stack = device.stack is None or device.stack == self.device.stack
        if measured.context_bytes is not None and same_stack:
            changes |= {"context_bytes": measured.context_bytes, "context_origin": Origin.MEASURED}
        return replace(device, **changes)

    def _check_memory(self, device: Device) -> None:
        """Refuses what no such device has, such as less than its own context takes."""
        usable_bytes = device.usable_bytes if self.measured.usable_bytes is None else self.measured.usable_bytes
        context_bytes = self.measured.context_bytes or 0
        # Cards are rebuilt with chips of twice the size.
        most_bytes = None if device.nominal_bytes is None else 2 * device.nominal_bytes
        if usable_bytes is not None and not context_bytes < usable_bytes <= (most_bytes or usable_bytes):
            raise BadFile(
                f"the calibration of {self.device.title} has {format_size(usable_bytes)} usable and a context of "
                f"{format_size(context_bytes)}, which no such device has. Remove it, and run `memfit calibrate` again."
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it as a calibration file, whole or not at all; raises BadFile where that can't be."""
        written(lambda: self.reporters.write_json(self.to_json(), os.fspath(path)), "calibration", path)

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """What `to_json` wrote, from its structure or its text."""
        result = super(Verification, cls).from_json(data)
        if result.device.stack is not None and len(result.device.stack.torch) < 2:
            raise BadFile("not a calibration written by memfit: device.stack.torch is no version, such as [2, 4].")
        return result


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Refuses to write a calibration over what is there and is none."""
    try:
        if os.path.getsize(path):
            Verification.load(path)
    except BadFile as error:
        raise BadFile(
            f"{os.fspath(path)!r} is there already and is no calibration: it would be lost. Name another file, or "
            "remove it."
        ) from error
    except (OSError, ValueError):
        return  # missing, or for `save` to refuse

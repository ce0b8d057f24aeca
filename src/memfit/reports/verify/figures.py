"""What every report of a verification says, before any of them decides how it looks."""

from memfit.core.device import Origin
from memfit.core.printing import printable
from memfit.core.units import format_size
from memfit.core.verification import ModelCheck, Verification
from memfit.reports.estimate.figures import UNKNOWN, device_title, with_origin
from memfit.reports.parts import Figure, Grid, Line, Part, Report

# Beyond that, a prediction is no good news.
_GOOD = 0.05


def report(verification: Verification) -> Report:
    """Predictions beside measurements, then the device."""
    worst, num_steps = verification.worst_error, len(verification.compared)
    lines = tuple(_line(check) for check in verification.checks)
    is_rehearsal = verification.origin is not Origin.MEASURED
    if is_rehearsal:
        verdict = f"{device_title(verification.device)}: a rehearsal on the simulated device; nothing was measured"
    elif worst is None:
        verdict = f"{device_title(verification.device)}: no step ran, so that nothing could be compared"
    else:
        verdict = f"{device_title(verification.device)}: predicted peaks of {num_steps} step"
        verdict += f"{'s' * (num_steps != 1)} are at most {worst:.1%} off"
    details = [printable(verification.software)]
    if verification.num_left_out:
        details.append(f"no time was left for {verification.num_left_out} of the steps; give more with --seconds")
    columns: tuple[str, ...] = ("step", ">peak", f">{verification.origin}", ">error")
    if any(check.predicted_reserved_bytes is not None for check in verification.checks):
        columns += (">reserved", f">{verification.origin}", ">error")
    columns += (">time",)
    return Report(
        verdict,
        details,
        [
            Part("Predicted peaks of steps (simulated) beside what they took", grid=Grid(columns, lines)),
            Part("Device", figures=tuple(_figures(verification))),
        ],
        None if is_rehearsal or worst is None else worst <= _GOOD,
    )


def _line(check: ModelCheck) -> Line:
    """What was predicted, what was measured, and the error; reserved memory only where there is such a thing."""
    cells = [
        f"{check.name} ({check.precision})",
        format_size(check.predicted_allocated_bytes),
        format_size(check.measured_allocated_bytes),
        _percent(check.allocated_error),
    ]
    if check.predicted_reserved_bytes is not None:
        cells += [format_size(check.predicted_reserved_bytes), format_size(check.measured_reserved_bytes)]
        cells.append(_percent(check.reserved_error))
    remarks = (f"did not run: {printable(check.failure)}",) if check.failure else ()
    return Line((*cells, _milliseconds(check.measured_seconds)), remarks)


def _figures(verification: Verification) -> list[Figure]:
    """What was measured of the device; beside it, in the label, what the catalogue says."""
    device, measured, origin = verification.device, verification.measured, verification.origin.value
    context = with_origin(device.context_bytes, device.context_origin)
    launch = measured.launch_seconds
    bandwidth = device.bandwidth_bytes_per_second
    rows = [
        ("memory", _size(measured.usable_bytes), with_origin(device.usable_bytes, device.usable_origin)),
        ("context of a process", _size(measured.context_bytes), context),
        ("cuBLAS workspace", _size(measured.cublas_workspace_bytes), ""),
        ("bandwidth of a copy", _rate(measured.bandwidth_bytes_per_second), _rate(bandwidth)),
        ("host to device", _rate(measured.transfer_bytes_per_second), ""),
        ("launch of a kernel", "" if launch is None else f"{launch * 1e6:.1f} us", ""),
        *(
            (f"product of large {name} matrices", f"{rate / 1e12:.2f} TFLOP/s", _teraflops(device.flops.get(name)))
            for name, rate in measured.flops.items()
        ),
    ]
    return [
        Figure(f"{label} (catalogue: {known})" if known and known != UNKNOWN else label, value, origin)
        for label, value, known in rows
        if value
    ]


def _size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_size(size_bytes)


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{format_size(round(rate))}/s"


def _teraflops(rate: float | None) -> str:
    return "" if rate is None else f"{rate / 1e12:.1f} TFLOP/s peak"


def _percent(error: float | None) -> str:
    # Rounded first: "-0.0%" is none.
    return UNKNOWN if error is None else f"{round(error, 3) + 0.0:+.1%}"


def _milliseconds(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{seconds * 1e3:.1f} ms"


def format_verification(verification: Verification) -> str:
    """The report as text."""
    return str(report(verification))

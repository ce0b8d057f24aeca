"""`memfit.verify` and `memfit.calibrate`: predictions beside measurements on the device in hand."""

import datetime
import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.api.devices import calibration_folder, calibration_path, own_gpu, resolve
from memfit.api.estimate import estimate
from memfit.api.jobs import on_installed_stack, torch_adapter
from memfit.api.simulate import simulate
from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import BadFile, BadInput
from memfit.core.estimate import Estimate
from memfit.core.job import Job
from memfit.core.oom import caught
from memfit.core.progress import doing
from memfit.core.verification import Measured, ModelCheck, Verification, check_replaceable

SECONDS = 120.0
"""About how long it may take, where nobody says."""


def verify(device: str | Device | None = None, *, seconds: float = SECONDS, rehearse: bool = False) -> Verification:
    """Predictions of a dozen small training steps beside what they really take on this machine.

    Args:
        device: None for this machine's GPU, or "cpu".
        seconds: about how long it may take; steps for which no time is left, but for the first, are left out.
        rehearse: everything is run on the simulated `device`, which need not be there: nothing is measured.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise BadInput(f"seconds must be a positive number, but {seconds!r} was given.")
    target = _target(device, rehearse=rehearse)
    torch_adapter()
    from memfit.frameworks.torch.verify.measure import Runner
    from memfit.frameworks.torch.verify.steps import list_steps

    begun = time.perf_counter()
    on_gpu = target.kind is Kind.CUDA
    runner = Runner("cuda" if on_gpu else "cpu")
    jobs = list_steps(on_gpu=on_gpu)
    with doing(f"measuring {target.title}"), _running(target, rehearse=rehearse):
        measured = runner.measure_device()
    checks: list[ModelCheck] = []
    for number, (job, batch_size) in enumerate(jobs):
        left = seconds - (time.perf_counter() - begun)
        if left <= 0 and checks:
            break
        with doing(f"predicting {job.name}"):
            prediction = estimate(job, device=target, batch_size=batch_size)
        with doing(f"running {job.name}"), _running(target, rehearse=rehearse):
            checks.append(_check(runner, job, prediction, left / (2 * (len(jobs) - number))))
    if rehearse:
        # Shapes alone take no time.
        measured = Measured(measured.usable_bytes, measured.context_bytes, measured.cublas_workspace_bytes)
        checks = [replace(check, measured_seconds=None) for check in checks]
    return Verification(
        device=on_installed_stack(target, torch_adapter().stack(), "PyTorch"),
        origin=Origin.SIMULATED if rehearse else Origin.MEASURED,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        measured=measured,
        checks=tuple(checks),
        seconds=time.perf_counter() - begun,
        num_left_out=len(jobs) - len(checks),
    )


def calibrate(
    device: str | Device | None = None, *, path: str | os.PathLike[str] | None = None, seconds: float = SECONDS
) -> Verification:
    """Measures the device in hand and keeps the result: from then on, estimates for it use what was measured.

    Args:
        device: None for this machine's GPU, or "cpu".
        path: of a file to write instead, for another machine: estimates there take it with `device=path`.
        seconds: as for `verify`.
    """
    # Before any time is spent on what to write.
    if path is None:
        _make_folder(calibration_folder())
    else:
        check_replaceable(path)
    result = verify(device, seconds=seconds)
    result.save(calibration_path(result.device) if path is None else path)
    return result


def _make_folder(folder: Path) -> None:
    """Makes the folder in which calibrations are kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, "it can't be written to")
    except OSError as error:
        raise BadFile(
            f"there is no folder {str(folder)!r} to keep a calibration in: {error.strerror}. Name a folder for it with "
            "MEMFIT_CACHE, or a file with --output NAME.json (path=...)."
        ) from error


def _target(device: Any, *, rehearse: bool) -> Device:
    if rehearse:
        return resolve(device)
    named = None if device is None else resolve(device)
    if named is not None and named.name == "cpu":
        return named
    try:
        own = own_gpu()
    except BadInput as error:
        raise BadInput(
            "this machine has no CUDA device that PyTorch can use, and only a device in hand can be measured. Measure "
            "the host, device='cpu' (--device cpu), or see what is run on a GPU without measuring anything: --rehearse "
            "(rehearse=True) with --device t4."
        ) from error
    target = named or own
    if own.name != target.name:
        raise BadInput(
            f"only the device in hand can be measured, which is {own.title}, but {target.title} was given. "
            "To see what is run, without measuring anything: --rehearse (rehearse=True)."
        )
    return own


@contextmanager
def _running(target: Device, *, rehearse: bool) -> Iterator[None]:
    if not rehearse:
        yield
        return
    with simulate(target):
        yield


def _check(runner: Any, job: Job, prediction: Estimate, seconds: float) -> ModelCheck:
    """A step, run, beside its prediction."""
    on_gpu = prediction.device.kind is Kind.CUDA
    check = ModelCheck(
        name=job.name,
        precision=prediction.precision,
        batch_size=prediction.batch_size or 0,
        predicted_allocated_bytes=prediction.allocated_peak_bytes,
        predicted_reserved_bytes=prediction.reserved_peak_bytes if on_gpu else None,
        predicted_seconds=None if prediction.time is None else prediction.time.seconds,
    )
    runs: list[Any] = []
    try:
        failure = caught(lambda: runs.append(runner.run(job, check.batch_size, seconds)))
        why = "" if failure is None else failure.text or "out of memory"
    except Exception as error:
        # A device or a build of PyTorch that can't do one thing still shows how it does the others.
        why = f"{type(error).__name__}: {error}"
    if why:
        return replace(check, failure=why.splitlines()[0])
    (run,) = runs
    return replace(
        check,
        measured_allocated_bytes=run.allocated_bytes,
        measured_reserved_bytes=run.reserved_bytes,
        measured_seconds=run.seconds,
    )

"""How commands write: tables through rich, JSON plainly, progress to standard error."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from memfit.core.device import Device
from memfit.core.estimate import Estimate
from memfit.reports import terminal


@contextmanager
def progress(text: str, *, quiet: bool) -> Iterator[None]:
    """A spinner with the time passed on standard error, where that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(text, total=None)
        yield


def print_json(value: Any) -> None:
    """Writes `value` as one JSON document."""
    json.dump(value, sys.stdout)
    sys.stdout.write("\n")


def print_estimate(estimate: Estimate) -> None:
    """Writes one estimate."""
    terminal.print_estimate(estimate)


def print_comparison(estimates: Sequence[Estimate]) -> None:
    """Writes estimates side by side."""
    _print(terminal.render_comparison(estimates))


def print_devices(devices: Sequence[Device]) -> None:
    """Writes the catalogue."""
    _print(terminal.render_devices(devices))


def print_max_batch(tried: Sequence[tuple[int, int, bool]], chosen: int | None, device: Device) -> None:
    """Writes what a search for the largest batch found."""
    _print(terminal.render_max_batch(tried, chosen, device))


def _print(renderable: Any) -> None:
    from rich.console import Console

    Console().print(renderable)

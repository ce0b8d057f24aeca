"""What the benchmark scripts share when they publish: the table, the bars, and the facts that make a number repeatable.

A result without its date, commit, versions and machine can't be checked by anybody else. Every script therefore ends in
`publish`, which prints the page and, for a run over all the usual data, writes it to docs/results/<name>.md.
"""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from memfit.core.units import GIB

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"

_PACKAGES = ("torch", "torchvision", "timm", "transformers", "keras", "tensorflow-cpu", "jax")


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    commit = git("rev-parse", "--short", "HEAD")
    if not commit:
        return "unknown"
    return commit + (" and changes since" if git("status", "--porcelain", "--", "src", "benchmarks") else "")


# Taken when the script starts: a long run may outlast a commit.
_COMMIT = _commit()


def commit() -> str:
    """The commit of the sources when the script started, and whether they had changed since."""
    return _COMMIT


@dataclass(frozen=True, slots=True)
class Bar:
    """A claim, what was measured, and the limit it is held to.

    Args:
        claim: what is measured.
        measured: the outcome, with its unit.
        limit: what it must be, in words.
        met: whether it is.
    """

    claim: str
    measured: str
    limit: str
    met: bool


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; columns after the first are aligned right."""
    rules = ["---", *("--:" for _ in headers[1:])]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (headers, rules, *rows))


def bullets(lines: Iterable[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def percent(share: float) -> str:
    """A relative error with its sign, such as "+1.25%"."""
    return f"{share:+.2%}"


def facts() -> str:
    """When, from which sources, with which versions and on what machine."""
    packages = ", ".join(f"{name} {version}" for name in _PACKAGES if (version := _version(name)) is not None)
    memory = f"{psutil.virtual_memory().total / GIB:.0f} GiB"
    machine = f"{os.cpu_count()} {platform.machine()} cores, {memory}, {platform.system()}"
    return bullets(
        [
            f"Date: {datetime.datetime.now(datetime.UTC).date().isoformat()}",
            f"Commit: {_COMMIT}",
            f"Versions: Python {platform.python_version()}, {packages}",
            f"Machine: {machine}, no GPU used, load average {os.getloadavg()[0]:.1f}",
        ]
    )


def publish(name: str, title: str, bars: Sequence[Bar], sections: Iterable[str], *, save: bool) -> None:
    """Prints the page of a benchmark, and writes it to docs/results/<name>.md when `save` is true.

    Args:
        name: of the script, without its ending.
        title: heading of the page.
        bars: claims held to a limit; may be empty.
        sections: Markdown, in order.
        save: false for a part of the data or somebody else's: the page in the repository shows the whole.
    """
    verdicts = [(bar.claim, bar.measured, bar.limit, "yes" if bar.met else "**no**") for bar in bars]
    parts = [f"# {title}", f"Written by `python -m benchmarks.{name}`.", facts()]
    if verdicts:
        parts += ["## Bars", table(("claim", "measured", "bar", "met"), verdicts)]
    text = "\n\n".join([*parts, *sections]) + "\n"
    print(text)
    if save:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

"""Runs cases in a process of their own, and says how each of them ended.

Keras has one backend in each process, so that the cases of other backends are run by another pytest, all of them at
once. JAX goes with Keras on JAX: one process compiles for both.
Run as: child.py FILE NODE...; writes a line of JSON to FILE by case.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

_SECONDS = 900
_RANKS = ("passed", "skipped", "failed")


@dataclass(frozen=True)
class Outcome:
    """How a case ended: "passed", "skipped" or "failed", and why."""

    kind: str
    text: str = ""


def run(node_ids: list[str], keras_backend: str, root: Path) -> dict[str, Outcome]:
    """Outcomes by node; those of a process that ended early are failures.

    Args:
        node_ids: of the cases, relative to `root`.
        keras_backend: that Keras has in the new process.
        root: where pytest is run.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "outcomes.jsonl")
        path.touch()
        environment = os.environ | {
            "KERAS_BACKEND": keras_backend,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": "",
            "JAX_PLATFORMS": "cpu",
            # Half the time to compile, the same memory: XLA lays it out before LLVM sees the program.
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
        }
        command = [sys.executable, "-P", __file__, path, *node_ids]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        try:
            done = subprocess.run(command, env=environment, cwd=root, timeout=_SECONDS, check=False, **pipes)
            end = f"the process ended with {done.returncode} before this case did:\n{done.stdout[-4000:]}"
        except subprocess.TimeoutExpired:
            end = f"the process had not come to the end of this case after {_SECONDS} s"
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    early = Outcome("failed", end)
    return dict.fromkeys(node_ids, early) | {line["node"]: Outcome(line["kind"], line["text"]) for line in lines}


class _Recorder:
    """Writes down how each case ended, when it is over."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._outcome = Outcome("passed")

    def pytest_runtest_logstart(self) -> None:
        self._outcome = Outcome("passed")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if _RANKS.index(report.outcome) > _RANKS.index(self._outcome.kind):
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self._outcome = Outcome(report.outcome, text.removeprefix("Skipped: "))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        line = {"node": nodeid, "kind": self._outcome.kind, "text": self._outcome.text}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        # What frameworks have loaded stays; memfit collects garbage often, and would look through all of it each time.
        gc.freeze()


def _main(path: str, *node_ids: str) -> int:
    # Without what pyproject.toml adds: coverage, and the search for doctests.
    options = ("-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider", "-q")
    return int(pytest.main([*options, *node_ids], plugins=[_Recorder(path)]))


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))

"""A child that runs no script: it does what the first of its script's arguments says, and leaves a result made by hand.

Started as a process of its own, with the path of a request, by the tests of whatever starts children. Each start leaves
a line in the file that the environment names, so that tests see how often and how it was asked.
"""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from memfit.core.dryrun import DryRun, Outcome, Request  # noqa: E402
from tests.unit.reports.run_builders import (  # noqa: E402
    make_dead_run,
    make_failure,
    make_run,
    make_run_estimate,
    make_scan,
)

LOG = "FAKE_CHILD_LOG"


def result(request: Request, behaviour: str) -> DryRun:
    """What this child claims to have found out."""
    run = make_run(script=request.script, arguments=request.arguments, estimate=make_run_estimate(request.device))
    if request.largest_first:
        run = dataclasses.replace(run, scan=make_scan(fits=None, peak_bytes=None, failure=None))
    too_much = behaviour == "oom" or (behaviour == "long batch" and request.largest_first)
    if too_much and not request.unlimited:
        died = make_dead_run(script=request.script, arguments=request.arguments, scan=run.scan, advice=())
        small = make_run_estimate(request.device)
        short = dataclasses.replace(small, timeline=dataclasses.replace(small.timeline, blocks=(), num_ticks=200))
        return dataclasses.replace(died, estimate=dataclasses.replace(short, replay=_halved(small.replay)))
    if behaviour == "oom then failure" and not request.unlimited:
        return make_dead_run(script=request.script, advice=(), estimate=make_run_estimate(request.device))
    if behaviour == "oom then failure":
        return dataclasses.replace(run, outcome=Outcome.FAILED, estimate=None)
    if behaviour == "fails on the largest" and request.largest_first:
        return dataclasses.replace(run, outcome=Outcome.FAILED, error="IndexError: too long (train.py:3)")
    if behaviour == "no loader":
        return dataclasses.replace(run, scan=None)
    if behaviour == "no step":
        return dataclasses.replace(run, outcome=Outcome.NO_STEP, num_steps=0)
    if behaviour == "failure":
        return dataclasses.replace(run, outcome=Outcome.FAILED, num_steps=1, error="ValueError: no (train.py:3)")
    if behaviour == "fails compiled" and request.compiles:
        return dataclasses.replace(
            run, outcome=Outcome.FAILED, compiler_failed=True, error="TypeError: no (train.py:3)"
        )
    if behaviour == "caught":
        return dataclasses.replace(run, failures=(make_failure(handled=True),))
    return run


def _halved(replay):
    return dataclasses.replace(replay, reserved_peak_bytes=replay.reserved_peak_bytes // 2)


def main() -> int:
    request = Request.from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    behaviour = request.arguments[0] if request.arguments else "complete"
    if os.environ.get(LOG):
        with open(os.environ[LOG], "a", encoding="utf-8") as log:
            line = {**request.to_json(), "hash_seed": os.environ.get("PYTHONHASHSEED"), "pid": os.getpid()}
            log.write(json.dumps({**line, "device": request.device.name}) + "\n")
    print(f"script says hello to {sys.stdin.read()!r}" if behaviour == "reads" else "script says hello", flush=True)
    print("script complains", file=sys.stderr, flush=True)
    if behaviour.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, behaviour))
    if behaviour == "exit":
        os._exit(7)
    if behaviour == "garbage":
        Path(request.result_path).write_text('{"format": "memfit.dryrun"', encoding="utf-8")
        return 1
    if behaviour in ("waits", "ignores"):
        wait(request, behaviour)
    if behaviour == "tells" or (behaviour == "waits for more" and request.scan and request.largest_first):
        # As a script's run does that is interrupted: it says how far it got.
        with contextlib.suppress(KeyboardInterrupt):
            Path(request.arguments[1]).write_text(str(os.getpid()), encoding="utf-8")
            time.sleep(120)
    data = {**result(request, behaviour).to_json(), "loader_ordinal": 4}
    Path(request.result_path).write_text(json.dumps(data), encoding="utf-8")
    return 0


def wait(request: Request, behaviour: str) -> None:
    """Waits for the signal that ends it, beside a process of its own; says so before it does."""
    if behaviour == "ignores":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    worker = os.fork()
    if not worker:
        time.sleep(120)
        os._exit(0)
    Path(request.arguments[1]).write_text(f"{os.getpid()} {worker}", encoding="utf-8")
    time.sleep(120)


if __name__ == "__main__":
    sys.exit(main())

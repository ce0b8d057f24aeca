"""How long `import memfit` and its first verb take to load, beside an interpreter that imports nothing.

python -m benchmarks.import_time [--repeats N]
"""

import argparse
import subprocess
import sys
import time
from statistics import median

from benchmarks.reporting import Bar, publish, table

NUM_REPEATS = 15
LIMIT_SECONDS = 0.2
# Public names are loaded when they are first used: a verb's name brings in what all verbs share.
CODES = ("pass", "import memfit", "from memfit import estimate")


def seconds_of(code: str) -> float:
    """Wall time of a fresh interpreter that runs `code`."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - started


def main() -> None:
    """Measure all in turn, so that a busy moment of the machine hits all, and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=NUM_REPEATS)
    repeats: int = parser.parse_args().repeats
    for code in CODES:
        seconds_of(code)  # byte code is written once
    rounds = [[seconds_of(code) for code in CODES] for _ in range(repeats)]
    seconds = dict(zip(CODES, (median(column) for column in zip(*rounds, strict=True)), strict=True))
    costs = {code: seconds[code] - seconds["pass"] for code in CODES if code != "pass"}
    bars = [
        Bar(f"`{code}`, less an empty interpreter", f"{cost:.3f} s", f"< {LIMIT_SECONDS} s", cost < LIMIT_SECONDS)
        for code, cost in costs.items()
    ]
    rows = [(f"`{code}`", f"{taken:.3f}") for code, taken in seconds.items()]
    body = [f"Medians of {repeats} fresh interpreters each.", table(("code", "seconds"), rows)]
    publish("import_time", "Time of `import memfit`", bars, body, save=repeats == NUM_REPEATS)


if __name__ == "__main__":
    main()

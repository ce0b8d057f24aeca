"""How long `import memfit` takes, beside an interpreter that imports nothing.

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


def seconds_of(code: str) -> float:
    """Wall time of a fresh interpreter that runs `code`."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - started


def main() -> None:
    """Measure both in turn, so that a busy moment of the machine hits both, and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=NUM_REPEATS)
    repeats: int = parser.parse_args().repeats
    seconds_of("import memfit")  # byte code is written once
    pairs = [(seconds_of("pass"), seconds_of("import memfit")) for _ in range(repeats)]
    empty, full = (median(column) for column in zip(*pairs, strict=True))
    cost = full - empty
    bar = Bar("import memfit, less an empty interpreter", f"{cost:.3f} s", f"< {LIMIT_SECONDS} s", cost < LIMIT_SECONDS)
    rows = [("`pass`", f"{empty:.3f}"), ("`import memfit`", f"{full:.3f}")]
    body = [f"Medians of {repeats} fresh interpreters each.", table(("code", "seconds"), rows)]
    publish("import_time", "Time of `import memfit`", [bar], body, save=repeats == NUM_REPEATS)


if __name__ == "__main__":
    main()

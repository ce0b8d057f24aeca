"""Training that runs out of memory at random points, against training that never did.

    python -m benchmarks.guard_faults [--schedules 504] [--first 0]

Each schedule draws when an operator of a step finds no memory: in the forward or backward pass, in clipping, in the
first or a later update; once or twice in a step. A guard brings the run through, in as many micro-batches as the
failures force it to. A plain loop, written without memfit, then trains with the same micro-batches and no failure.
Compared are all weights, bit by bit.
"""

import argparse
import itertools
import sys
from collections import Counter

import torch

from benchmarks.guard_cases import MODELS, OPTIMIZERS, Case, Schedule, guarded_loop, largest_difference, plain_loop
from benchmarks.reporting import Bar, publish, table

KINDS = list(itertools.product(MODELS, OPTIMIZERS, (False, True)))
STEPS = 50
METHOD = f"""\
{STEPS} steps each, of a convolutional network, a transformer with tied embeddings and an LSTM, with dropout, clipping,
two groups of parameters and a schedule; with SGD, Adam and AdamW; with and without a gradient scaler. Failures are
raised by a dispatch mode under the guard with the text of PyTorch's CPU allocator, at an operator that the schedule
draws.
"""


def main() -> int:
    """Runs the schedules and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=504, help="how many; default 504")
    parser.add_argument("--first", type=int, default=0, help="number of the first; default 0")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    unequal: list[int] = []
    gave_up = 0
    failures: Counter[str] = Counter()
    by_kind: dict[tuple[str, str, bool], list[int]] = {kind: [0, 0, 0] for kind in KINDS}
    for seed in range(arguments.first, arguments.first + arguments.schedules):
        kind = KINDS[seed % len(KINDS)]
        case = Case(kind[0], kind[1], kind[2], seed=seed)
        guarded = guarded_loop(case, STEPS, Schedule(seed, STEPS))
        equal = largest_difference(guarded.model, plain_loop(case, guarded.parts)) == 0
        failures.update(phase if step or phase != "update" else "first update" for step, phase in guarded.raised)
        gave_up += guarded.gave_up
        row = by_kind[kind]
        row[0] += 1
        row[1] += equal
        row[2] += len(guarded.raised)
        if not equal:
            unequal.append(seed)
        if sys.stderr.isatty():
            print(f"\r{seed + 1 - arguments.first} of {arguments.schedules}", end="", file=sys.stderr)
    total = sum(failures.values())
    bars = [
        Bar(
            f"weights after {STEPS} steps, {arguments.schedules} schedules with {total} failures",
            f"{arguments.schedules - len(unequal)} bit-equal",
            "every schedule",
            not unequal,
        )
    ]
    rows = [(model, optimizer, "yes" if scaled else "no", *row) for (model, optimizer, scaled), row in by_kind.items()]
    head = ("model", "optimizer", "scaler", "schedules", "bit-equal", "failures")
    phases = table(("phase", "failures"), sorted(failures.items()))
    save = arguments.schedules >= 500
    remark = f"In {gave_up} steps nothing was left to try: `CannotFit` was caught and the step called again."
    publish(
        "guard_faults", "Out of memory at random points", bars, [METHOD, table(head, rows), phases, remark], save=save
    )
    if unequal:
        print(f"unequal: {unequal}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Predicted against measured memory of Llama-3.1-8B sharded over H100s with FSDP2 (torchtitan's published table).

    python -m benchmarks.fsdp_memory [--csv PATH]

Columns: model, gpus, gpu_total_gib, mode, compile, float8, seq_len, local_batch, peak in GiB (the greatest that
PyTorch reserved on a device), and what else was set. `benchmarks/scripts/llama_fsdp.py` trains as those runs did; it is
dry-run on one simulated rank. Compiled runs and those with context parallelism are not among what it does.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import memfit
from benchmarks import rows
from benchmarks.reporting import Bar, percent, publish, table
from memfit.allocator import replay
from memfit.core.units import GIB

DEFAULT_CSV = rows.DATA / "cluster_memory.csv"
SCRIPT = Path(__file__).parent / "scripts" / "llama_fsdp.py"
# The runs used a nightly build of December 2024.
STACK = "torch2.6-cu124"
LIMIT = 0.02
_STEPS = 2

ABOUT = """\
Each rank reserves what its own pools hold: FSDP2 gathers parameters on one stream and reduces gradients on another, and
what a stream has freed serves no other stream. The column *one pool* is what the same allocations would reserve if all
streams shared their memory. Nothing is fitted: the script follows the published configuration (sequences of 8,192
tokens, 2 on each device, every other product of matrices kept, AdamW on lists of tensors)."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row beside its prediction, in bytes."""

    row: rows.Row
    allocated: int
    reserved: int
    in_one_pool: int

    @property
    def error(self) -> float:
        """Of the reserved memory."""
        return self.reserved / (float(self.row["peak"]) * GIB) - 1


def is_plain(row: rows.Row) -> bool:
    """Whether the script does what the row's run did."""
    return (
        row["mode"].startswith("FSDP2 shard ") and "CP" not in row["mode"] and row["compile"] == row["float8"] == "no"
    )


def predict(row: rows.Row) -> Outcome:
    """A row beside its prediction."""
    capacity_bytes = int(float(row["gpu_total_gib"]) * GIB)
    device = replace(memfit.find_device("h100-80gb", stack=STACK), usable_bytes=capacity_bytes)
    run = memfit.dryrun(SCRIPT, device=device, count=int(row["gpus"]), steps=_STEPS)
    assert run.estimate is not None, run.error
    timeline = run.estimate.timeline
    joined = replace(timeline, blocks=tuple(replace(block, stream=0) for block in timeline.blocks))
    peaks = run.estimate.allocated_peak_bytes, run.estimate.reserved_peak_bytes
    return Outcome(row, *peaks, replay(joined).reserved_peak_bytes)


def main() -> None:
    """Predict each row and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=DEFAULT_CSV, help="measured rows")
    options = parser.parse_args()
    known = rows.read_rows(options.csv)
    outcomes = [predict(row) for row in known if is_plain(row)]
    worst = max(outcomes, key=lambda outcome: abs(outcome.error))
    claim = (
        f"reserved memory of a rank, FSDP2 over {' and '.join(o.row['gpus'] for o in outcomes)} H100: greatest error"
    )
    bars = [Bar(claim, percent(worst.error), f"at most {LIMIT:.0%}", abs(worst.error) <= LIMIT)]
    cells = [
        (
            o.row["gpus"],
            o.row["peak"],
            f"{o.reserved / GIB:.2f}",
            percent(o.error),
            f"{o.in_one_pool / GIB:.2f}",
            f"{o.allocated / GIB:.2f}",
        )
        for o in outcomes
    ]
    titles = ("devices", "measured, GiB", "predicted", "error", "one pool", "allocated")
    left = f"{len(known) - len(outcomes)} of {len(known)} rows are compiled runs or use context parallelism."
    body = [ABOUT, table(titles, cells), left]
    publish("fsdp_memory", "Llama-3.1-8B with FSDP2 on H100", bars, body, save=options.csv == DEFAULT_CSV)


if __name__ == "__main__":
    main()

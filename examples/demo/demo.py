"""Models, a plan and a script on GPUs that are not here: `make demo`, or `python examples/demo/demo.py [FOLDER]`."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

import memfit

GPUS = ("t4", "rtx-3090", "a100-40gb")
MODELS = {
    "resnet50": ("torchvision:resnet50", 512, {}),
    "gpt2": ("hf:GPT2LMHeadModel", 12, {"sequence_length": 1024}),
}
PRECISION = "amp-fp16"
PLANNED, PLANNED_BATCH, PLANNED_GPU = "torchvision:resnet50", 512, "t4"
SCRIPT = Path(__file__).parents[1] / "dryrun" / "train.py"
SCRIPT_GPU = "rtx-3090"


def gib(size_bytes):
    return f"{size_bytes / 2**30:.1f} GiB"


def main():
    started = time.perf_counter()
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "out")
    folder.mkdir(parents=True, exist_ok=True)
    table = Table("model", "batch size", "GPU", "needed", "usable", "fits", "largest batch", "mostly")
    for name, (target, batch_size, options) in MODELS.items():
        try:
            job = memfit.named_job(target, **options)
        except memfit.MemfitError as error:
            print(f"{target} is left out: {error}")
            continue
        for gpu in GPUS:
            estimate = memfit.estimate(job, device=gpu, precision=PRECISION, batch_size=batch_size)
            largest = memfit.max_batch(job, device=gpu, precision=PRECISION).batch_size
            table.add_row(
                target,
                str(batch_size),
                gpu,
                gib(estimate.peak_bytes),
                gib(estimate.capacity_bytes),
                "yes" if estimate.fits else "no",
                str(largest or "none"),
                next(iter(estimate.breakdown.by_category)),
            )
            if gpu == GPUS[0]:
                page = folder / f"{name}.html"
                estimate.report(str(page))
                print(f"page of {target} on {gpu}: {page}")
    # A pipe has no width of its own; 120 columns hold the table.
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table)
    console.print(f"One training step each: AdamW, {PRECISION}, 224 x 224 images or 1024 tokens. No GPU was used.")
    plan(folder)
    dry_run(folder)
    print(f"{time.perf_counter() - started:.0f} s in all.")


def plan(folder):
    """The fastest way to fit what does not fit as it is."""
    try:
        job = replace(memfit.named_job(PLANNED), precision=PRECISION)
    except memfit.MemfitError:
        return  # The table has said that it is left out.
    found = memfit.plan(job, device=PLANNED_GPU, effective_batch=PLANNED_BATCH)
    page = folder / "plan.html"
    found.report(str(page))
    print(f"\nplan of {PLANNED}, batch size {PLANNED_BATCH}, on {PLANNED_GPU}:")
    print(f"{gib(found.before.peak_bytes)} -> {gib(found.after.peak_bytes)} of {gib(found.budget_bytes)}: ", end="")
    print("; ".join(move.title for move in found.moves))
    print(f"page of the plan: {page}")


def dry_run(folder):
    """A whole script, as it is; what it prints goes to standard error."""
    run = memfit.dryrun(os.path.relpath(SCRIPT), device=SCRIPT_GPU, quiet_output=True)
    page = folder / "dryrun.html"
    run.report(str(page))
    print(f"\nmemfit dryrun --device {SCRIPT_GPU} {run.script}")
    print(f"{run.num_steps} steps, {gib(run.estimate.peak_bytes)} of {gib(run.estimate.capacity_bytes)}: ", end="")
    print("fits" if run.fits else "does not fit")
    print(f"page of the dry run: {page}")


if __name__ == "__main__":
    main()

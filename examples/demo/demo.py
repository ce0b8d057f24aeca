"""The whole story: a script that runs out of memory, why, what would fit, and a run that finishes.

`make demo`, or `python examples/demo/demo.py [FOLDER]`. Linux; elsewhere the parts that need a real limit are left out.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import memfit

SCRIPT = Path(__file__).with_name("train.py")
CAP_MIB = 600
GPUS = ("t4", "rtx-3090", "a100-40gb")
MODELS = {
    "resnet50": ("torchvision:resnet50", 512, {}),
    "gpt2": ("hf:GPT2LMHeadModel", 12, {"sequence_length": 1024}),
}
PRECISION = "amp-fp16"


def main():
    started = time.perf_counter()
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "out")
    folder.mkdir(parents=True, exist_ok=True)
    if sys.platform.startswith("linux"):
        story(folder)
    else:
        print("A real limit of memory needs Linux: that part is left out.")
    table(folder)
    print(f"{time.perf_counter() - started:.0f} s in all.")


def story(folder):
    script = os.path.relpath(SCRIPT)
    heading(f"1. python {script}, with {CAP_MIB} MiB of memory")
    died = capped()
    print(died.stdout.strip() or "(it printed nothing)")
    print(f"It died, exit code {died.returncode}: {died.stderr.strip().splitlines()[-1][:120]}")

    heading("2. memfit estimate: why")
    model, loss, batch, optimizer = parts()
    estimate = memfit.estimate(model, loss, batch, optimizer=optimizer, device="cpu")
    estimate.report(folder / "estimate.html")
    baseline = process_bytes()
    print(f"Python and PyTorch take {mib(baseline)} (measured), one step {mib(estimate.peak_bytes)} (simulated):")
    for name, size in list(estimate.breakdown.by_category.items())[:4]:
        print(f"  {name:<20}{mib(size):>10}")

    heading("3. memfit plan: the fastest settings that fit")
    room = CAP_MIB * 2**20 - baseline
    plan = memfit.plan(model, loss, batch, optimizer=optimizer, device="cpu", budget=room)
    plan.report(folder / "plan.html")
    print(f"{mib(plan.before.peak_bytes)} -> {mib(plan.after.peak_bytes)} of {mib(room)}: ", end="")
    print("; ".join(move.title for move in plan.moves))

    heading(f"4. memfit run --rescue --budget {CAP_MIB}MiB {script}: it finishes")
    page = folder / "run.html"
    command = [sys.executable, "-m", "memfit", "run", "--rescue", "--budget", f"{CAP_MIB}MiB", "--html", str(page)]
    finished = subprocess.run([*command, script], text=True, capture_output=True, check=False)
    print(finished.stdout.strip())
    print("\n".join(line for line in finished.stderr.splitlines() if "memfit rescue" in line))
    free = subprocess.run([sys.executable, script], text=True, capture_output=True, check=True)
    mine, expected = (weights(output) for output in (finished.stdout, free.stdout))
    same = "the same, bit by bit" if mine == expected else "DIFFERENT"
    print(f"Without any limit its weights are {expected}: {same}.")
    print(f"\nPages: {folder / 'estimate.html'}, {folder / 'plan.html'}, {page}")
    if finished.returncode or mine != expected:
        sys.exit(finished.stderr)


def heading(text):
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def capped():
    """The script under a real limit."""
    import resource

    def limit():
        resource.setrlimit(resource.RLIMIT_DATA, (CAP_MIB * 2**20, CAP_MIB * 2**20))

    return subprocess.run([sys.executable, SCRIPT], text=True, capture_output=True, preexec_fn=limit, check=False)


def parts():
    """What the script trains, for an estimate and a plan."""
    sys.path.insert(0, str(SCRIPT.parent))
    import torch
    import train

    torch.manual_seed(0)
    model = train.Decoder()
    return model, train.loss, train.make_batch(), torch.optim.AdamW(model.parameters(), lr=1e-3)


def process_bytes():
    """Data of a process that has imported PyTorch and does nothing yet."""
    code = "import torch; print(next(l for l in open('/proc/self/status') if l.startswith('VmData')).split()[1])"
    return int(subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True).stdout) * 1024


def weights(output):
    return next((line.split()[-1] for line in output.splitlines() if line.startswith("weights:")), "none")


def table(folder):
    """Two models on GPUs that are not here."""
    heading("5. GPUs that this machine doesn't have")
    rows = Table("model", "batch size", "GPU", "needed", "usable", "fits", "largest safe batch", "mostly")
    for target, batch_size, options in MODELS.values():
        try:
            job = memfit.named_job(target, **options)
        except memfit.MemfitError as error:
            print(f"{target} is left out: {error}")
            continue
        for gpu in GPUS:
            largest = memfit.max_batch(job, device=gpu, precision=PRECISION)
            estimate = largest.estimate.at_batch(batch_size)
            rows.add_row(
                target,
                str(batch_size),
                gpu,
                gib(estimate.peak_bytes),
                gib(estimate.capacity_bytes),
                "yes" if estimate.fits else "no",
                str(largest.batch_size),
                next(iter(estimate.breakdown.by_category)),
            )
    # A pipe has no width of its own; 120 columns hold the table.
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(rows)
    console.print(f"One training step each: AdamW, {PRECISION}, 224 x 224 images or 1024 tokens. No GPU was used.")


def gib(size_bytes):
    return f"{size_bytes / 2**30:.1f} GiB"


def mib(size_bytes):
    return f"{size_bytes / 2**20:.0f} MiB"


if __name__ == "__main__":
    main()

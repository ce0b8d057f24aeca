"""Runs every benchmark, one after the other, each in a process of its own.

    python -m benchmarks.run_all [--quick]

Pages go to docs/results. A quick run takes samples, prints them, and leaves a page alone where it saw only a part. A
bar that is missed is a result and shown as one; the exit code tells only whether every script ran.
"""

import argparse
import subprocess
import sys
import time

from benchmarks.reporting import ROOT

# Script, its arguments, and its arguments in a quick run.
SCRIPTS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("import_time", (), ("--repeats", "5")),
    ("speed", (), ("--repeats", "1")),
    ("scale", (), ("Llama-3-8B",)),
    ("allocator_speed", (), ()),
    ("dryrun_speed", (), ("--quick", "--repeats", "1")),
    ("dryrun_scripts", (), ("vae", "dqn")),
    ("cuda_snapshots", (), ()),
    ("snapshot_steps", (), ()),
    ("cpu_accuracy", (), ()),
    ("t4_runs", (), ()),
    ("xmem_cnn", (), ()),
    ("fsdp_memory", (), ()),
    ("coverage", (), ("--sample", "4")),
    ("timm_rtx3090", ("--jobs", "2"), ("--jobs", "2", "--sample", "24")),
    ("plan_time", (), ("--quick", "--repeats", "1")),
    ("plan_speed", (), ("deit_tiny", "--rounds", "3")),
    ("plan_checkpointing", (), ("resnet18", "gpt2")),
    ("plan_accuracy", (), ("tcn", "gpt2", "--shares", "60", "40")),
    ("plan_gradients", (), ("shufflenet_v2", "llama")),
    ("plan_public_table", (), ("--moves", "3")),
    ("guard_faults", (), ("--schedules", "36")),
    ("guard_kills", (), ("--kills", "12")),
    ("guard_overhead", (), ("resnet18", "--rounds", "4")),
    ("stream_speed", (), ("--size", "256MiB", "--repeats", "1", "--seconds", "5", "--no-peers")),
    ("stream_tables", (), ("--size", "64MB", "--repeats", "1")),
    ("stream_memory", (), (".npy", "--factor", "4")),
    ("stream_shuffle", (), ("--shuffles", "3", "--epochs", "1")),
    ("stream_resume", (), ("--points", "20")),
    ("stream_workers", (), ("--samples", "100000")),
    ("convert_speed", (), ("--size", "256MiB", "--repeats", "1", "--kills", "4", "--kill-size", "128MiB")),
    ("jax_accuracy", (), ()),
    ("keras_accuracy", (), ("MLP", "--backends", "torch")),
    ("keras_plans", (), ("MLP", "--backends", "torch")),
    ("keras_equality", (), ("torch",)),
    ("keras_overhead", (), ("--rounds", "2")),
    ("keras_survival", (), ("transformer", "--backends", "tensorflow")),
)


def main() -> int:
    """Run all scripts; 1 when one of them failed to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="samples and few repetitions")
    quick: bool = parser.parse_args().quick
    failed = []
    for name, full, few in SCRIPTS:
        print(f"== {name}", flush=True)
        started = time.monotonic()
        command = [sys.executable, "-m", f"benchmarks.{name}", *(few if quick else full)]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(name)
        print(f"== {name}: {'failed' if name in failed else 'done'} in {time.monotonic() - started:.0f} s", flush=True)
    if failed:
        print(f"failed to run: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

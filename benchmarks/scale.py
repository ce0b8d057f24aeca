"""Time and host memory of estimates of models far larger than this machine.

    python -m benchmarks.scale [MODEL ...]

Each model is built from its configuration, without weights, and estimated in a fresh process. The time is that of
`memfit.estimate`, building included; the memory is the process's greatest resident set, interpreter and libraries
included.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch
import transformers
from torch import Tensor

import memfit
from benchmarks import rows
from benchmarks.reporting import ROOT, Bar, publish, table
from memfit.core.units import GIB, KIB, format_size

DEVICE = "h200"
SEQUENCE_LENGTH = 4096
LIMIT_SECONDS = 90
LIMIT_BYTES = 3 * GIB

# Shapes of the published configurations.
MODELS: dict[str, dict[str, int]] = {
    "Llama-3-8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
    "Llama-3-70B": {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 128256,
    },
}


def loss(model: Any, batch: Tensor) -> Tensor:
    """The model's own loss."""
    value: Tensor = model(input_ids=batch, labels=batch).loss
    return value


def measure(name: str) -> dict[str, Any]:
    """One row of the table, in this process."""
    config = transformers.LlamaConfig(max_position_embeddings=2 * SEQUENCE_LENGTH, **MODELS[name])
    job = memfit.Job(
        model=lambda: transformers.LlamaForCausalLM(config),
        loss=loss,
        batch=lambda count: torch.empty(count, SEQUENCE_LENGTH, dtype=torch.int64, device="meta"),
        optimizer=torch.optim.AdamW,
        precision="bf16",
    )
    started = time.perf_counter()
    estimate = memfit.estimate(job, device=DEVICE, batch_size=1)
    return {
        "seconds": time.perf_counter() - started,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB,
        "num_parameters": estimate.num_parameters,
        "peak_bytes": estimate.peak_bytes,
        "fits": estimate.fits,
    }


def measure_apart(name: str) -> dict[str, Any]:
    """One row of the table, in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.scale", "--worker", name]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure the named models, or all, and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", choices=[[], *MODELS], help="default: all")
    parser.add_argument("--worker", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        transformers.logging.set_verbosity_error()
        with rows.quietly():
            print(json.dumps(measure(options.worker)))
        return
    bars, lines = [], []
    for name in options.models or MODELS:
        found = measure_apart(name)
        seconds, resident = found["seconds"], found["resident_bytes"]
        bars += [
            Bar(f"{name}: time", f"{seconds:.1f} s", f"< {LIMIT_SECONDS} s", seconds < LIMIT_SECONDS),
            Bar(f"{name}: resident", format_size(resident), f"< {format_size(LIMIT_BYTES)}", resident < LIMIT_BYTES),
        ]
        peak, fits = format_size(found["peak_bytes"]), "yes" if found["fits"] else "no"
        lines.append((name, f"{found['num_parameters']:,}", f"{seconds:.1f}", format_size(resident), peak, fits))
    headers = ("model", "parameters", "seconds", "resident", "predicted peak", f"fits {DEVICE}")
    intro = f"AdamW, bf16 throughout, 1 x {SEQUENCE_LENGTH} tokens, predicted for one {DEVICE}."
    publish("scale", "Estimates of large models", bars, [intro, table(headers, lines)], save=not options.models)


if __name__ == "__main__":
    main()

"""Measures how much memory real training steps take on the CPU, as the truth that predictions are held against.

    python -m benchmarks.measure_cpu [case ...]

Each (case, optimizer) runs in a process of its own: two full steps under torch's profiler, which reports every
allocation and free of torch's CPU allocator, including what kernels take for themselves. The peak is the greatest
running sum of these, plus what existed before the first step: parameters, buffers and the batch. Nothing is warmed up;
the loss of a step stays alive until the next step replaces it. Results go to tests/accuracy/cpu_measured.json; naming
cases replaces only their rows.
"""

import argparse
import datetime
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from benchmarks.zoo import CASES, Case
from memfit.frameworks.torch.verify.measure import allocations, find_peak, storage_bytes

RESULTS = Path(__file__).parents[1] / "tests" / "accuracy" / "cpu_measured.json"
NUM_THREADS = 2
NUM_STEPS = 2
MARK = "memfit:"


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """One of the optimizers of the table."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if name == "adam":
        return torch.optim.Adam(model.parameters())
    return torch.optim.AdamW(model.parameters())


def run_steps(model: nn.Module, case: Case, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    """The training loop that is measured, with a mark where each phase begins."""
    loss = None
    for step in range(1, NUM_STEPS + 1):
        optimizer.zero_grad(set_to_none=True)
        with record_function(f"{MARK}forward:{step}"):
            loss = case.loss(model, batch)
        with record_function(f"{MARK}backward:{step}"):
            loss.backward()
        with record_function(f"{MARK}optimizer:{step}"):
            optimizer.step()


def measure(name: str, optimizer_name: str) -> dict[str, Any]:
    """One row of the table; call it in a fresh process."""
    torch.set_num_threads(NUM_THREADS)
    torch.manual_seed(0)
    case = CASES[name]
    model, batch = case.build(), case.batch()
    optimizer = make_optimizer(optimizer_name, model)
    tensors = [t for t in tree_leaves(batch) if isinstance(t, Tensor)]
    baseline = storage_bytes([*model.parameters(), *model.buffers(), *tensors])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run_steps(model, case, batch, optimizer)
    peak, where = find_peak(allocations(prof))
    mark = next(name for name in where if name.startswith(MARK))
    _, phase, step = mark.split(":")
    return {
        "case": name,
        "kind": case.kind,
        "optimizer": optimizer_name,
        "peak_bytes": baseline + peak,
        "baseline_bytes": baseline,
        "phase": phase,
        "step": int(step),
        "op": [op for op in where if not op.startswith((MARK, "autograd::engine"))][-1],
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def measure_apart(name: str, optimizer_name: str) -> dict[str, Any]:
    """One row of the table, measured in a forked process; this process only ever imports."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        sender.send(measure(name, optimizer_name))

    process = context.Process(target=work)
    process.start()
    sender.close()
    try:
        row: dict[str, Any] = receiver.recv()
    except EOFError:
        raise RuntimeError(f"measuring {name} with {optimizer_name} failed; its traceback is above") from None
    finally:
        process.join()
    return row


def save(rows: list[dict[str, Any]]) -> None:
    """Write the rows in the order of the zoo, over those of the same case and optimizer."""
    order = {name: index for index, name in enumerate(CASES)}
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    merged = {(row["case"], row["optimizer"]): row for row in [*known, *rows] if row["case"] in order}
    ordered = sorted(
        merged.values(), key=lambda row: (order[row["case"]], CASES[row["case"]].optimizers.index(row["optimizer"]))
    )
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in ordered) + "\n]\n")


def main() -> None:
    """Measure the named cases, or all, and save the table after each case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", metavar="case", choices=[[], *CASES], help="default: all")
    names = parser.parse_args().cases or list(CASES)
    for number, name in enumerate(names, 1):
        start, rows = time.monotonic(), [measure_apart(name, optimizer) for optimizer in CASES[name].optimizers]
        save(rows)
        peaks = ", ".join(f"{row['optimizer']} {row['peak_bytes'] / 1e6:.1f} MB ({row['phase']})" for row in rows)
        print(f"[{number}/{len(names)}] {name}: {peaks}, {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()

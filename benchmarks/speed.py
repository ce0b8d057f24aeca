"""How long an estimate takes, beside a plain trace of the same training step by PyTorch's FakeTensorMode.

    python -m benchmarks.speed [--repeats N]

Every repetition is a fresh process that imports everything and builds the model before the clock starts. The first
call finds empty shape caches (cold), the median of the next three does not (warm). The plain trace runs forward,
backward and optimizer step once on CPU fake tensors and records nothing; `memfit.estimate` runs the same step, the
optimizer a second time and, when that was quick, the step at a second batch size, and replays the allocator.
"""

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memfit
from benchmarks import rows
from benchmarks.reporting import ROOT, Bar, publish, table

DEVICE = "rtx-3090"
NUM_REPEATS = 5
NUM_WARM = 3
NEW_BATCH_SIZES = (64, 48)
NEW_BATCH_LIMIT_MS = 50
RATIO_LIMIT = 1.0


METHOD = """\
Seconds, medians of {repeats} fresh processes each. Imports and building the model are counted on neither side. Cold:
the first call of the process; warm: the median of the next three. The plain trace is one forward, backward and
optimizer step on CPU fake tensors, recording nothing. `batch N` is `at_batch(N)` of the first estimate, right after
it."""


class Case:
    """A training step to time.

    Args:
        title: what it is, in words.
        build: makes the model.
        loss: of the model and a batch.
        batch: makes a batch, as real tensors.
        optimizer: of `torch.optim`.
        limit_seconds: that a cold estimate may take.
    """

    def __init__(
        self,
        title: str,
        build: Callable[[], nn.Module],
        loss: Callable[[Any, Any], Tensor],
        batch: Callable[[], Any],
        optimizer: Callable[[Any], torch.optim.Optimizer],
        limit_seconds: float,
    ) -> None:
        self.title = title
        self.build = build
        self.loss = loss
        self.batch = batch
        self.optimizer = optimizer
        self.limit_seconds = limit_seconds


def build_resnet() -> nn.Module:
    """ResNet-50 of torchvision."""
    from torchvision import models  # only now: `rows` has made sure that it can be imported

    return models.resnet50(weights=None)


def language_loss(model: Any, batch: Tensor) -> Tensor:
    """The model's own loss."""
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss


CASES = {
    "resnet50": Case(
        "ResNet-50, 32 x 224, Adam, fp32",
        build_resnet,
        rows.classify,
        lambda: (torch.zeros(32, 3, 224, 224), torch.zeros(32, dtype=torch.int64)),
        torch.optim.Adam,
        1.5,
    ),
    "gpt2": Case(
        "GPT-2 small, 8 x 512, AdamW, fp32",
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config()),
        language_loss,
        lambda: torch.zeros(8, 512, dtype=torch.int64),
        torch.optim.AdamW,
        2.0,
    ),
}


def seconds_of(action: Callable[[], object]) -> float:
    """Wall time of a call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def time_memfit(case: Case) -> dict[str, float]:
    """Seconds of memfit's verbs, in this process."""
    importlib.import_module("memfit.frameworks.torch.trace.job")  # the first estimate would import it
    model, batch = case.build(), case.batch()
    options: dict[str, Any] = {"optimizer": case.optimizer, "device": DEVICE}
    made = []

    def estimate() -> None:
        made.append(memfit.estimate(model, case.loss, batch, **options))

    found = {"cold": seconds_of(estimate)}
    for size in NEW_BATCH_SIZES:
        found[f"batch {size}"] = seconds_of(lambda size=size: made[0].at_batch(size))
    found["warm"] = median(seconds_of(estimate) for _ in range(NUM_WARM))
    found["max_batch"] = seconds_of(lambda: memfit.max_batch(model, case.loss, batch, **options))
    return found


def time_plain(case: Case) -> dict[str, float]:
    """Seconds of one training step on fake tensors, in this process."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = case.build()
        batch = torch.utils._pytree.tree_map(mode.from_tensor, case.batch())
        optimizer = case.optimizer(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            case.loss(model, batch).backward()
            optimizer.step()

        return {"cold": seconds_of(step), "warm": median(seconds_of(step) for _ in range(NUM_WARM))}


TIMERS = {"memfit": time_memfit, "plain": time_plain}


def time_apart(kind: str, name: str) -> dict[str, float]:
    """What a timer finds in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.speed", "--worker", kind, name]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """Median of each figure over the repetitions."""
    return {key: median(run[key] for run in runs) for key in runs[0]}


def bars(name: str, ours: dict[str, float], plain: dict[str, float]) -> list[Bar]:
    """The claims about a case."""
    limit = CASES[name].limit_seconds
    found = [Bar(f"{name}: first estimate", f"{ours['cold']:.2f} s", f"within {limit} s", ours["cold"] <= limit)]
    for heat in ("cold", "warm"):
        ratio = ours[heat] / plain[heat]
        claim = f"{name}: {heat} estimate / plain trace"
        found.append(Bar(claim, f"{ratio:.2f}", f"at most {RATIO_LIMIT}", ratio <= RATIO_LIMIT))
    slowest = max(ours[f"batch {size}"] for size in NEW_BATCH_SIZES) * 1e3
    claim = f"{name}: another batch size"
    found.append(Bar(claim, f"{slowest:.0f} ms", f"within {NEW_BATCH_LIMIT_MS} ms", slowest <= NEW_BATCH_LIMIT_MS))
    return found


def main() -> None:
    """Time all cases and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=NUM_REPEATS)
    parser.add_argument("--worker", nargs=2, metavar=("KIND", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        kind, name = options.worker
        transformers.logging.set_verbosity_error()
        with rows.quietly():
            print(json.dumps(TIMERS[kind](CASES[name])))
        return
    lines, verdicts = [], []
    for name, case in CASES.items():
        runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in TIMERS}
        for _ in range(options.repeats):
            for kind, found in runs.items():  # in turn, so that a busy moment of the machine hits both
                found.append(time_apart(kind, name))
        ours, plain = (medians(runs[kind]) for kind in ("memfit", "plain"))
        verdicts += bars(name, ours, plain)
        lines += [
            (case.title, key, f"{value:.3f}", f"{plain[key]:.3f}" if key in plain else "")
            for key, value in ours.items()
        ]
    sections = [
        METHOD.format(repeats=options.repeats),
        table(("step", "call", "memfit", "plain FakeTensorMode step"), lines),
    ]
    publish("speed", "Time of an estimate", verdicts, sections, save=options.repeats == NUM_REPEATS)


if __name__ == "__main__":
    main()

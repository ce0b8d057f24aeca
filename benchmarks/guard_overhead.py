"""What a guard costs while memory suffices: the guarded loop against the plain one, in one run.

    python -m benchmarks.guard_overhead [--rounds 12]

ResNet-18 at batch 32 and a GPT-2-small-like decoder at batch 4, trained with AdamW and clipping on the CPU. Plain and
guarded steps take turns, so that both meet the same machine; each has its own model of the same values. The time is
processor time of the whole process, which other programs disturb less than the clock. The peak is that of the CPU
allocator, in a process for each.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import memfit
from benchmarks.measure_cpu import NUM_THREADS
from benchmarks.plan_cases import apart
from benchmarks.reporting import Bar, publish, table

MODELS = ("resnet18", "gpt2")
METHOD = """\
Steps of both loops take turns; the ratio of a pair is compared, and the median of the ratios is the result. The extra
peak is the greatest number of bytes that were live in the CPU allocator in the guarded loop, over that of the plain
one, in the second step.
"""


@dataclass(frozen=True, slots=True)
class Loop:
    """A training loop, ready to take steps."""

    step: Callable[[], object]
    model: nn.Module


def make(name: str, *, guarded: bool) -> Loop:
    """Builds a loop, with equal values each time."""
    from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators

    torch.set_num_threads(NUM_THREADS)
    torch.manual_seed(0)
    batch: Any
    if name == "resnet18":
        define_missing_operators()
        from torchvision.models import resnet18

        model: nn.Module = resnet18()
        batch = torch.randn(32, 3, 224, 224), torch.randint(1000, (32,))
    else:
        from transformers import GPT2Config, GPT2LMHeadModel

        model = GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=768, n_head=12, vocab_size=8192, use_cache=False))
        tokens = torch.randint(8192, (4, 128))
        batch = tokens, tokens
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        if name == "resnet18":
            return nn.functional.cross_entropy(model(inputs), targets)
        value: Tensor = model(input_ids=inputs, labels=targets).loss
        return value

    if guarded:
        guard = memfit.Guard(model, optimizer, clip_norm=1.0, plan=None, options=memfit.GuardOptions(remember=False))
        return Loop(lambda: guard.step(loss, batch), model)

    def step() -> None:
        optimizer.zero_grad()
        loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return Loop(step, model)


def ratios(name: str, rounds: int) -> list[float]:
    """Processor time of guarded steps over that of plain ones, for pairs that follow each other."""
    loops = {guarded: make(name, guarded=guarded) for guarded in (False, True)}
    for loop in loops.values():
        loop.step()
    found = []
    for number in range(rounds):
        seconds = {}
        for guarded in (False, True) if number % 2 else (True, False):
            started = time.process_time()
            loops[guarded].step()
            seconds[guarded] = time.process_time() - started
        found.append(seconds[True] / seconds[False])
    return found


def peak(name: str, guarded: bool) -> int:
    """Greatest number of live bytes in the second step, beyond those before it."""
    loop = make(name, guarded=guarded)
    loop.step()
    held = sum(parameter.numel() * parameter.element_size() for parameter in loop.model.parameters())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        loop.step()
    rows: list[tuple[int, int]] = []

    def walk(events: Any) -> None:
        for event in events:
            if event.name == "[memory]":
                rows.append((event.start_time_ns, event.typed[1].alloc_size))
            walk(event.children)

    walk(prof.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    live = most = 0
    for _, change in sorted(rows):
        live += change
        most = max(most, live)
    # Parameters, gradients and the two moments are there before.
    return 4 * held + most


def main() -> int:
    """Measures and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="pairs of steps; default 12")
    parser.add_argument("models", nargs="*", help="resnet18, gpt2; both by default")
    arguments = parser.parse_args()
    bars, rows = [], []
    for name in arguments.models or MODELS:
        found = apart(partial(ratios, name, arguments.rounds), name)
        median = statistics.median(found)
        plain, guarded = (apart(partial(peak, name, how), name) for how in (False, True))
        bars.append(Bar(f"time of a guarded step, {name}", f"{median - 1:+.2%}", "at most +2%", median <= 1.02))
        extra = guarded / plain - 1
        bars.append(Bar(f"peak of a guarded step, {name}", f"{extra:+.2%}", "at most +1%", extra <= 0.01))
        low, high = statistics.quantiles(found, n=4)[0], statistics.quantiles(found, n=4)[2]
        rows.append((name, f"{median:.4f}", f"{low:.4f} to {high:.4f}", plain, guarded))
    head = ("model", "median ratio", "middle half", "plain peak, bytes", "guarded peak, bytes")
    complete = not arguments.models and arguments.rounds >= 10
    publish("guard_overhead", "What a guard costs", bars, [METHOD, table(head, rows)], save=complete)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What the rescue costs while memory suffices, and when it doesn't: steps of two models, as ratios to the plain loop.

    python -m benchmarks.rescue_overhead [--rounds N]

A step is run plain, with the rescue taken off again (as it is after the first steps), armed (as it is close to the
limit), and eager (all that can be is moved), in turns in one process. The least time of all turns counts.

The page is printed and not kept: the setting of the C library's allocator outlasts a turn of the rescue, so that plain
turns after the first are not quite plain, and times of a busy machine differ by more than the bar. A result to keep
needs a process for each kind, and processor time.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.reporting import Bar, publish, table
from memfit.frameworks.torch.rescue import Rescue

ROUNDS = 3
LIMIT = 1.02
KINDS = ("plain", "taken off", "armed", "eager")
METHOD = """\
Seconds of a whole step, forward, backward and update, one thread, the least of all turns; the ratio is to the plain
step. "taken off": the rescue is enabled, and memory suffices. "armed": hooks and mode are on, and large blocks are
mapped. "eager": in addition, all saved activations that can be go to files."""


class Residual(nn.Module):
    """Two convolutions around which the input is added, as in a ResNet-18.

    Args:
        narrow: channels in.
        wide: channels out.
        stride: of the first convolution.
    """

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(narrow, wide, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(wide), nn.BatchNorm2d(wide)])
        self.skip = nn.Conv2d(narrow, wide, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The block's result."""
        hidden = F.relu(self.norms[0](self.first(inputs)), inplace=True)
        return F.relu(self.norms[1](self.second(hidden)) + self.skip(inputs), inplace=True)


def resnet() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """A network like ResNet-18 with 32 images of 32 by 32, and its loss."""
    blocks: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    narrow = 64
    for wide in (64, 128, 256, 512):
        blocks += [Residual(narrow, wide, 1 if wide == 64 else 2), Residual(wide, wide, 1)]
        narrow = wide
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    return model, lambda model: F.cross_entropy(model(images), labels)


def gpt() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """A transformer of 6 blocks of width 384 with 4 texts of 256 tokens, and its loss."""
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.1, batch_first=True, norm_first=True, activation="gelu")
    body = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(8192, 384), body, nn.Linear(384, 8192))
    tokens, labels = torch.randint(0, 8192, (4, 256)), torch.randint(0, 8192, (4 * 256,))
    return model, lambda model: F.cross_entropy(model(tokens).flatten(0, 1), labels)


@contextmanager
def taken_off() -> Iterator[None]:
    """The rescue as it is while memory suffices: it looks at the process's memory after each step."""
    with Rescue() as made:
        made.disarm()
        yield


def context(kind: str) -> Any:
    """What a step of this kind runs in."""
    if kind == "plain":
        return nullcontext()
    return taken_off() if kind == "taken off" else Rescue(eager=kind == "eager")


def measure(make: Callable[[], tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]], rounds: int) -> dict[str, float]:
    """The least seconds of a step of each kind."""
    torch.manual_seed(0)
    model, loss = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    least = dict.fromkeys(KINDS, float("inf"))
    for number in range(rounds + 1):
        for kind in KINDS if number % 2 else KINDS[::-1]:
            with context(kind):
                # One step to warm up: the allocator behaves differently from kind to kind.
                for _ in range(2):
                    started = time.perf_counter()
                    loss(model).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    seconds = time.perf_counter() - started
            if number:
                least[kind] = min(least[kind], seconds)
    return least


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds: int = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows, bars = [], []
    for name, make in (("like ResNet-18, batch 32", resnet), ("like GPT, batch 4", gpt)):
        least = measure(make, rounds)
        ratios = {kind: least[kind] / least["plain"] for kind in KINDS}
        rows.append((name, f"{least['plain']:.3f}", *(f"{ratios[kind]:.3f}" for kind in KINDS[1:])))
        bars.append(
            Bar(
                f"{name}: step with the rescue taken off",
                f"{ratios['taken off']:.3f}",
                f"<= {LIMIT}",
                ratios["taken off"] <= LIMIT,
            )
        )
    headers = ("model", "plain, s", *(f"{kind}, ratio" for kind in KINDS[1:]))
    publish(
        "rescue_overhead",
        "What the rescue costs",
        bars,
        ["## Steps", METHOD, table(headers, rows)],
        save=False,
    )


if __name__ == "__main__":
    main()

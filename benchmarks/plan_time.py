"""How long it takes to make a plan.

    python -m benchmarks.plan_time [--repeats N] [--quick]

Each plan is made in a fresh process; counted is `memfit.plan` alone, from the call to the answer, without the import of
libraries and, for a model that is there, without building it. "As shapes" means that the model is given as a function
that builds it: nothing is allocated, and building it counts. Budgets are half of the plain peak, for the 8-billion
model a whole device; if nothing fits, saying so is the answer and takes as long.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are built from configurations, nothing is fetched

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memfit
from benchmarks.reporting import ROOT, Bar, publish, table
from memfit.core.plan import PlanNotFound
from memfit.core.units import format_size
from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators
from memfit.planner.moves import label

LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "use_cache": False,
}


@dataclass(frozen=True, slots=True)
class Question:
    """What is planned.

    Args:
        title: model and batch in words.
        device: the target.
        share: budget in percent of the plain peak; None is all of the device.
        allow: as for `memfit.plan`.
        limit_seconds: the bar.
        has_weights: whether the model is built with values first.
    """

    title: str
    device: str
    share: int | None
    allow: tuple[str, ...]
    limit_seconds: float
    has_weights: bool = True


DEFAULT_ALLOW = ("exact", "rounding")
QUESTIONS = {
    "resnet50": Question("ResNet-50, batch 64", "rtx-3090", 50, DEFAULT_ALLOW, 10.0),
    "gpt2": Question("GPT-2, 8 x 1024 tokens", "rtx-3090", 50, DEFAULT_ALLOW, 10.0),
    "llama": Question(
        "Llama-3-8B, 4 x 2048 tokens, bf16", "h100-80gb", None, (*DEFAULT_ALLOW, "8-bit-optimizer"), 60.0, False
    ),
}


def resnet50() -> nn.Module:
    """ResNet-50 with random weights."""
    import torchvision

    model: nn.Module = torchvision.models.resnet50()
    return model


def gpt2() -> nn.Module:
    """GPT-2 with random weights."""
    import transformers

    model: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    return model


def llama() -> nn.Module:
    """Llama-3-8B's shapes in bfloat16."""
    import transformers

    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).to(torch.bfloat16)
    return model


def images() -> tuple[Tensor, Tensor]:
    """A batch for ResNet-50."""
    return torch.randn(64, 3, 224, 224), torch.randint(1000, (64,))


def classify(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy of the logits."""
    return F.cross_entropy(model(batch[0]), batch[1])


def own_loss(model: Any, batch: Tensor) -> Tensor:
    """The model's own loss."""
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss


STEPS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Callable[[Any, Any], Tensor]]] = {
    "resnet50": (resnet50, images, classify),
    "gpt2": (gpt2, lambda: torch.randint(50257, (8, 1024)), own_loss),
    "llama": (llama, lambda: torch.randint(128256, (4, 2048)), own_loss),
}


def import_libraries() -> None:
    """Imports what models are built with: that is not planning."""
    # Both import torchvision, whose operators must be there.
    define_missing_operators()
    import torchvision
    import transformers

    assert torchvision.models.resnet50 and transformers.LlamaForCausalLM and transformers.GPT2LMHeadModel


def plain_peak(name: str) -> int:
    """Predicted peak of the step as it is."""
    import_libraries()
    question, (build, batch, loss) = QUESTIONS[name], STEPS[name]
    estimate = memfit.estimate(build, loss, batch(), optimizer=torch.optim.AdamW, device=question.device)
    return estimate.peak_bytes


def measure(name: str, budget_bytes: int | None, *, as_shapes: bool) -> dict[str, Any]:
    """Makes one plan in this process."""
    import_libraries()
    question, (build, batch, loss) = QUESTIONS[name], STEPS[name]
    made = batch()
    model: Any = build if as_shapes else build()
    optimizer: Any = torch.optim.AdamW if as_shapes else torch.optim.AdamW(model.parameters())
    started = time.perf_counter()
    try:
        plan = memfit.plan(
            model,
            loss,
            made,
            optimizer=optimizer,
            device=question.device,
            budget=budget_bytes,
            allow=question.allow,
        )
    except PlanNotFound as error:
        found = error.smallest
    else:
        found = plan
    seconds = time.perf_counter() - started
    if found is None:
        raise SystemExit(f"{name}: not even the smallest plan could be traced")
    return {
        "seconds": seconds,
        "fits": found.fits,
        "label": label(found.settings),
        "before": found.before.peak_bytes,
        "after": found.after.peak_bytes,
    }


def in_fresh_process(*arguments: str) -> Any:
    """What this script answers to some arguments."""
    command = [sys.executable, "-m", "benchmarks.plan_time", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run(names: list[str], repeats: int) -> tuple[list[tuple[str, ...]], list[Bar]]:
    """(lines of the table, bars)."""
    lines: list[tuple[str, ...]] = []
    bars: list[Bar] = []
    for name in names:
        question = QUESTIONS[name]
        given: list[str] = []
        if question.share is not None:
            given = ["--budget", str(in_fresh_process("--peak", name) * question.share // 100)]
        for as_shapes in (False, True) if question.has_weights else (True,):
            arguments = ["--worker", name, *given, *(["--shapes"] * as_shapes)]
            found = [in_fresh_process(*arguments) for _ in range(repeats)]
            seconds = median(one["seconds"] for one in found)
            last = found[-1]
            outcome = f"{last['label']}: {format_size(last['after'])}{'' if last['fits'] else ', does not fit'}"
            title = f"{question.title}, {'as shapes' if as_shapes else 'with weights'}"
            budget = "all" if question.share is None else f"{question.share}% of the plain peak"
            where = f"{question.device}, {budget}"
            lines.append((title, where, format_size(last["before"]), outcome, f"{seconds:.1f} s"))
            limit = question.limit_seconds
            bars.append(Bar(title, f"{seconds:.1f} s", f"at most {limit:.0f} s", seconds <= limit))
            print(" | ".join(lines[-1]), flush=True)
    return lines, bars


def main() -> None:
    """Time every plan and publish the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="plans of each kind; the median counts")
    parser.add_argument("--quick", action="store_true", help="the first model only")
    parser.add_argument("--worker", choices=list(QUESTIONS), help=argparse.SUPPRESS)
    parser.add_argument("--peak", choices=list(QUESTIONS), help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--shapes", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(json.dumps(plain_peak(options.peak)))
        return
    if options.worker:
        print(json.dumps(measure(options.worker, options.budget, as_shapes=options.shapes)))
        return
    lines, bars = run(list(QUESTIONS)[:1] if options.quick else list(QUESTIONS), options.repeats)
    headers = ("model", "device, budget", "plain peak", "plan", "time")
    note = f"Medians of {options.repeats}, each in a fresh process. The optimizer is AdamW, its settings the defaults."
    publish("plan_time", "Time to make a plan", bars, [note, table(headers, lines)], save=not options.quick)


if __name__ == "__main__":
    main()

"""Gradients of planned steps against those of the plain step.

    python -m benchmarks.plan_gradients [case ...]

Models and inputs are float64, in training mode: dropout draws its masks, batch norm updates its statistics. For each
model and seed, a plan of exact moves is made for 85% of the plain peak and for as little as can be reached. Plan and
plain step start from equal weights, inputs and random numbers; compared are the gradients, the buffers, and the weights
after the update, which is all there is where the update happens inside of the backward pass.

Micro-batches round differently and draw other dropout masks: they are shown for models without dropout and batch norm,
as information.
"""

import argparse
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are built from configurations, nothing is fetched

import torch
from torch import Tensor, nn

import memfit
from benchmarks.plan_accuracy import plain_peak
from benchmarks.plan_cases import Made, Training, apart, make
from benchmarks.reporting import Bar, publish, table
from memfit.core.plan import Plan, PlanNotFound
from memfit.planner.moves import label

LIMIT = 1e-12
SEEDS = (0, 1)
EXACT, MICRO = ("exact",), ("micro-batch",)
# Shares of the plain peak: one that needs a few modules to be computed again, and one that nothing meets.
SHARES = (85, 30)
MICRO_SHARE = 60
# Adam's first update divides each gradient by its own size, so that it magnifies the rounding of those near zero: most
# models have SGD, and only some whose gradients come out equal bit by bit have Adam.
TRAININGS = (
    Training("resnet18", "sgd"),
    Training("mobilenet_v3_large", "sgd"),
    Training("densenet121", "sgd"),
    Training("convnext_tiny", "sgd"),
    Training("vit_small", "adamw"),
    Training("mlp_mixer", "sgd"),
    Training("unet", "adam"),
    Training("diffusion_unet", "sgd"),
    Training("vae", "sgd", 2),
    Training("bert", "sgd"),
    Training("gpt2", "sgd"),
    Training("llama", "adamw", 2),
    Training("t5", "sgd"),
    Training("transformer_translation", "sgd"),
    Training("dropout_decoder", "sgd"),
    Training("shufflenet_v2", "sgd"),
)
SPLIT = ("vit_small", "mlp_mixer", "diffusion_unet", "llama")
METHOD = """\
The error of a tensor is its greatest difference over its greatest value; the worst tensor counts. For micro-batches it
is the length of the difference of all gradients over the length of the gradients: single tensors whose true gradient is
zero, such as the biases of keys in attention, hold nothing but rounding. Weights after the update are shown beside:
Adam divides each gradient by its own size, which makes rounding in gradients near zero larger. They count where the
update happens in the backward pass, which leaves no gradients."""


@dataclass(frozen=True, slots=True)
class Row:
    """A planned step beside the plain one.

    Args:
        training: the model, its batch and its optimizer.
        seed: of weights, inputs and dropout.
        share: budget in percent of the plain peak.
        fits: whether it was met; otherwise the plan is the smallest that was found.
        label: the plan in a few words.
        recomputed: modules that are computed again.
        gradients: error of the worst gradient; None where the update happens in the backward pass.
        weights: error of the worst weight after the update.
        buffers: names of the buffers that differ at all.
        all_gradients: error of all gradients together.
    """

    training: Training
    seed: int
    share: int
    fits: bool
    label: str
    recomputed: int
    gradients: float | None
    weights: float
    buffers: tuple[str, ...]
    all_gradients: float

    @property
    def worst(self) -> float:
        """The error of the gradients; of the weights where the update happens in the backward pass."""
        return self.weights if self.gradients is None else self.gradients


def make_plan(training: Training, share: int, allow: Sequence[str]) -> tuple[bool, Plan]:
    """(whether a plan for a share of the plain peak was found, that plan, or the smallest there is)."""
    made = make(training, dtype=torch.float64)
    budget = plain_peak(training, torch.float64) * share // 100
    options: dict[str, Any] = {
        "optimizer": made.optimizer,
        "device": "cpu",
        "options": memfit.PlanOptions(measure=False),
    }
    try:
        return True, memfit.plan(made.model, made.loss, made.batch, budget=budget, allow=allow, **options)
    except PlanNotFound as error:
        if error.smallest is None:
            raise
        return False, error.smallest


def compare(training: Training, share: int, allow: Sequence[str], seed: int) -> Row:
    """Runs a planned and a plain step; call it in a fresh process."""
    fits, plan = make_plan(training, share, allow)
    plain, planned = (make(training, seed, torch.float64) for _ in range(2))
    torch.manual_seed(seed)
    plain.loss(plain.model, plain.batch).backward()
    plain.optimizer.step()
    with plan.apply(planned.model, planned.optimizer) as fitted:
        torch.manual_seed(seed)
        fitted.step(planned.loss, planned.batch)
    in_backward = plan.settings.step_in_backward
    gradients = [] if in_backward else list(zip(*map(_gradients, (planned, plain)), strict=True))
    weights = zip(planned.model.parameters(), plain.model.parameters(), strict=True)
    return Row(
        training,
        seed,
        share,
        fits,
        label(plan.settings),
        len(plan.settings.checkpoint),
        None if in_backward else max((_error(*pair) for pair in gradients), default=0.0),
        max(_error(a.detach(), b.detach()) for a, b in weights),
        tuple(_different_buffers(planned.model, plain.model)),
        _error_of_all(gradients),
    )


def _gradients(made: Made) -> list[Tensor]:
    """All gradients; one that isn't there is shown as such by its shape."""
    return [torch.empty(0) if p.grad is None else p.grad for p in made.model.parameters()]


def _error(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    difference, scale = float((found - expected).abs().max()), float(expected.abs().max())
    return difference / scale if scale else float(difference > 0)


def _error_of_all(gradients: Iterable[tuple[Tensor, Tensor]]) -> float:
    pairs = list(gradients)
    difference = sum(float((a - b).square().sum()) for a, b in pairs)
    length = sum(float(b.square().sum()) for _, b in pairs)
    return (difference / length) ** 0.5 if length else 0.0


def _different_buffers(found: nn.Module, expected: nn.Module) -> Iterable[str]:
    others = dict(expected.named_buffers())
    for name, buffer in found.named_buffers():
        if not torch.equal(buffer, others[name]):
            yield name


def run(trainings: Iterable[Training]) -> tuple[list[Row], list[Row]]:
    """(rows of exact plans, rows of micro-batches), each printed as it is known."""
    exact: list[Row] = []
    micro: list[Row] = []
    for training in trainings:
        tasks = [(exact, share, EXACT) for share in SHARES]
        if training.case in SPLIT:
            tasks.append((micro, MICRO_SHARE, MICRO))
        for rows, share, allow in tasks:
            for seed in SEEDS:
                what = f"{training.case} within {share}%"
                rows.append(apart(partial(compare, training, share, allow, seed), what))
                print(" | ".join(_cells(rows[-1])), flush=True)
    return exact, micro


def _cells(row: Row) -> tuple[str, ...]:
    gradients = "updated in the backward pass" if row.gradients is None else f"{row.gradients:.1e}"
    budget = f"{row.share}%" if row.fits else "smallest"
    buffers = "equal" if not row.buffers else f"{len(row.buffers)} differ"
    return (row.training.title, str(row.seed), budget, row.label, gradients, f"{row.weights:.1e}", buffers)


def bars(rows: Sequence[Row]) -> list[Bar]:
    """The claims, with what was measured."""
    worst = max(rows, key=lambda row: row.worst)
    changed = [row for row in rows if row.buffers]
    models = {row.training for row in rows}
    recomputed = {row.training for row in rows if row.recomputed}
    names = ", ".join(sorted({row.training.case for row in changed}))
    left = ", ".join(sorted(training.case for training in models - recomputed))
    return [
        Bar(
            f"greatest relative error of {len(rows)} exact plans of {len(models)} models",
            f"{worst.worst:.1e} ({worst.training.case})",
            f"at most {LIMIT:.0e}",
            worst.worst <= LIMIT,
        ),
        Bar(
            "plans after which a buffer, such as batch norm's, differs at all",
            f"{len(changed)} {names}".strip(),
            "none",
            not changed,
        ),
        Bar("models of which something is recomputed", f"{len(recomputed)} {left}".strip(), "all", not left),
    ]


def main() -> None:
    """Compare the named cases, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [training.case for training in TRAININGS]
    parser.add_argument("cases", nargs="*", metavar="case", choices=[[], *known], help="default: all")
    names = parser.parse_args().cases
    exact, micro = run(training for training in TRAININGS if not names or training.case in names)
    headers = ("model", "seed", "budget", "plan", "gradients", "weights after the update", "buffers")
    sections = [METHOD, table(headers, map(_cells, exact))]
    if micro:
        rows = [(*_cells(row)[:4], f"{row.all_gradients:.1e}") for row in micro]
        sections += ["## Micro-batches", table(("model", "seed", "budget", "plan", "all gradients"), rows)]
    publish("plan_gradients", "Gradients of planned steps", bars(exact), sections, save=not names)


if __name__ == "__main__":
    main()

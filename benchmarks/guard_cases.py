"""What the benchmarks and tests of the guard share: small trainings, plain loops to compare with, faults by schedule.

The plain loop is written without memfit: it splits a batch, weighs the parts by their samples or tokens, clips, scales
and updates as the framework's documentation says. Where a guarded run was forced to smaller micro-batches by failures,
the plain loop is told the number of parts of each step and does the same without any failure.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH = 16
VOCABULARY = 24
LENGTH = 12
BATCH = 16
MODELS = ("cnn", "transformer", "lstm")
OPTIMIZERS = ("sgd", "adam", "adamw")


class Cnn(nn.Module):
    """Convolutions with group norm and dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(3 if not i else WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(4, WIDTH), nn.ReLU())
                for i in range(3)
            )
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores."""
        scores: Tensor = self.head(self.dropout(self.layers(images).mean((2, 3))))
        return scores


class Transformer(nn.Module):
    """Two encoder layers with tied input and output embeddings."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token."""
        scores: Tensor = self.head(self.encoder(self.embedding(tokens)))
        return scores


class Lstm(nn.Module):
    """A two-layer LSTM over embeddings."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token."""
        scores: Tensor = self.head(self.rnn(self.embedding(tokens))[0])
        return scores


@dataclass(frozen=True, slots=True)
class Case:
    """One training.

    Args:
        model: one of `MODELS`.
        optimizer: one of `OPTIMIZERS`.
        scaled: whether a gradient scaler is used.
        dropout: of the model.
        clip: greatest norm of the gradients; None: any.
        seed: of weights, data and faults.
        dtype: of weights and images.
        ragged: whether the loss is a mean over unequal numbers of tokens, given as the weight.
    """

    model: str
    optimizer: str = "adamw"
    scaled: bool = False
    dropout: float = 0.1
    clip: float | None = 0.5
    seed: int = 0
    dtype: torch.dtype = torch.float32
    ragged: bool = False


@dataclass(slots=True)
class Made:
    """The live objects of a training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: Any
    batches: list[Any]
    loss: Callable[[Any, Any], Any]


def make(case: Case, num_batches: int) -> Made:
    """Builds a training, with equal values each time."""
    torch.manual_seed(case.seed)
    model = {"cnn": Cnn, "transformer": Transformer, "lstm": Lstm}[case.model](case.dropout).to(case.dtype)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 3e-3},
    ]
    optimizer: torch.optim.Optimizer = {
        "sgd": lambda: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
        "adam": lambda: torch.optim.Adam(groups, lr=1e-2),
        "adamw": lambda: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1),
    }[case.optimizer]()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7) if case.scaled else None
    batches = [_batch(case) for _ in range(num_batches)]
    return Made(model, optimizer, scheduler, scaler, batches, _ragged_loss if case.ragged else _loss)


def _batch(case: Case) -> tuple[Tensor, Tensor]:
    if case.model == "cnn":
        return torch.randn(BATCH, 3, 8, 8, dtype=case.dtype), torch.randint(5, (BATCH,))
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    targets = torch.randint(VOCABULARY, (BATCH, LENGTH))
    if case.ragged:
        lengths = torch.randint(1, LENGTH + 1, (BATCH, 1))
        targets = targets.masked_fill(torch.arange(LENGTH)[None, :] >= lengths, -100)
    return tokens, targets


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def _ragged_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return _loss(model, batch), int((batch[1] != -100).sum())


def plain_loop(case: Case, parts: list[int], accumulate: int = 1) -> nn.Module:
    """Trains with plain PyTorch, each batch in as many parts as `parts` says; the model afterwards."""
    made = make(case, len(parts))
    torch.manual_seed(case.seed + 1)
    for start in range(0, len(parts), accumulate):
        window = range(start, min(start + accumulate, len(parts)))
        made.optimizer.zero_grad()
        whole = 0.0
        for index in window:
            whole += _plain_passes(case, made, made.batches[index], parts[index], alone=accumulate == 1)
        if made.scaler is not None:
            made.scaler.unscale_(made.optimizer)
        if whole:
            for parameter in made.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / whole)
        if case.clip is not None:
            nn.utils.clip_grad_norm_(made.model.parameters(), case.clip)
        if made.scaler is None:
            made.optimizer.step()
            made.scheduler.step()
        else:
            scale = made.scaler.get_scale()
            made.scaler.step(made.optimizer)
            made.scaler.update()
            if made.scaler.get_scale() >= scale:
                made.scheduler.step()
    return made.model


def _plain_passes(case: Case, made: Made, batch: Any, num_parts: int, *, alone: bool) -> float:
    """Adds the gradients of one batch; what they have yet to be divided by, or 0."""
    split = [tensor.tensor_split(num_parts) for tensor in batch]
    whole = 0.0
    for part in zip(*split, strict=True):
        value = made.loss(made.model, part)
        factor = len(part[0]) / BATCH if alone else float(len(part[0]))
        if case.ragged:
            value, factor = value
            factor = 1.0 if alone and num_parts == 1 else float(factor)
        value = value * factor if factor != 1.0 else value
        (value if made.scaler is None else made.scaler.scale(value)).backward()
        if not alone or (case.ragged and num_parts > 1):
            whole += factor
    return whole


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    """Between any two parameters or buffers, relative to the greatest value of the tensor; 0 where bit-equal."""
    most = 0.0
    for (name, first), (_, second) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        if not torch.equal(first, second):
            difference = (first.double() - second.double()).abs().max()
            most = max(most, float(difference / second.double().abs().max().clamp_min(1e-300)), 5e-324)
            if not difference.isfinite():
                raise AssertionError(f"{name} is not finite")
    return most


MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "{size} bytes. Error code 12 (Cannot allocate memory)"
)


@dataclass(slots=True)
class Schedule:
    """When memory runs out, drawn at random.

    Args:
        seed: of the draw.
        steps: of the run.
        rate: share of steps in which it does.
    """

    seed: int
    steps: int
    rate: float = 0.15
    phases: tuple[str, ...] = ("forward", "backward", "clip", "update")
    faults: dict[int, list[tuple[str, int]]] = field(init=False)
    """By step: (phase, how many allocating operators of it go well before one fails), one for each try."""

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.faults = {}
        for step in range(self.steps):
            if step == 0 or draw.random() < self.rate:
                count = draw.choice((1, 1, 1, 2))
                self.faults[step] = [
                    (draw.choice(self.phases), min(draw.randrange(40), draw.randrange(40))) for _ in range(count)
                ]


class Faults(TorchDispatchMode):
    """Raises the CPU allocator's error where the schedule says.

    Args:
        schedule: when.
    """

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self.step = -1
        self.raised: list[tuple[int, str]] = []
        self._schedule = schedule
        self._pending: list[tuple[str, int]] = []
        self._phase = "forward"
        self._left = 0

    def begin(self, step: int) -> None:
        """A step begins."""
        self.step, self._pending = step, list(self._schedule.faults.get(step, []))
        self.enter("forward")

    def enter(self, phase: str) -> None:
        """A phase begins."""
        self._phase = phase
        if self._pending and self._pending[0][0] == phase:
            self._left = self._pending[0][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator, or fails as if its result found no memory."""
        phase = self._phase
        if phase == "forward" and torch._C._current_autograd_node() is not None:
            phase = "backward"
        if self._pending and self._pending[0][0] == phase and func.namespace == "aten" and not func.is_view:
            if self._left <= 0:
                self._pending.pop(0)
                if self._pending:
                    self._left = self._pending[0][1]
                self.raised.append((self.step, phase))
                raise RuntimeError(MESSAGE.format(size=1 << 30))
            self._left -= 1
        return func(*args, **(kwargs or {}))


@contextmanager
def observed(faults: Faults, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Tells the faults when the update begins and ends."""
    before = optimizer.register_step_pre_hook(lambda *_: faults.enter("update"))
    after = optimizer.register_step_post_hook(lambda *_: faults.enter("done"))
    try:
        with faults:
            yield
    finally:
        before.remove()
        after.remove()


@dataclass(slots=True)
class Guarded:
    """What a guarded run came to."""

    model: nn.Module
    parts: list[int]
    """Micro-batches of each step."""
    retries: int
    raised: list[tuple[int, str]]
    """(step, phase) of the faults that happened."""
    gave_up: int = 0
    """Steps that had to be called again, for nothing was left to try."""


def guarded_loop(
    case: Case, steps: int, schedule: Schedule | None = None, accumulate: int = 1, **options: Any
) -> Guarded:
    """Trains under a guard, with faults where the schedule says."""
    import memfit

    made = make(case, steps)
    torch.manual_seed(case.seed + 1)
    faults = Faults(schedule or Schedule(0, 0))

    def clip(model: nn.Module) -> None:
        faults.enter("clip")
        if case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)

    # Memory that is short for one operator is there again for the next: so the guard may soon try more.
    options = {"remember": False, "grow_after": 2, "scaler": made.scaler, "clip": clip, **options}
    done = Guarded(made.model, [], 0, faults.raised)
    with (
        memfit.Guard(
            made.model,
            made.optimizer,
            scheduler=made.scheduler,
            accumulate=accumulate,
            plan=None,
            options=memfit.GuardOptions(**options),
        ) as guard,
        observed(faults, made.optimizer),
    ):
        for step, batch in enumerate(guard.batches(made.batches)):
            faults.begin(step)
            try:
                result = guard.step(made.loss, batch)
            except memfit.CannotFit:
                # More failures in a row than there is to try; everything is as before, and memory is there again.
                done.gave_up += 1
                result = guard.step(made.loss, batch)
            done.parts.append(result.micro_batches)
            done.retries += result.retries
    return done

"""What the scripts of several processes share: models, batches, and guarded and undisturbed runs of them."""

import hashlib
import random

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import memfit
from memfit.frameworks.torch.guard.ranks import ranks_of
from memfit.frameworks.torch.guard.transaction import Transaction
from tests.unit.frameworks.torch.guard.faults import Faults

WIDTH = 12
PHASES = {"forward": 60, "backward": 120, "finish": 40, "commit": 60}
"""Of each phase, below which index an operator is made to fail."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.outer(torch.relu(self.inner(self.norm(x)))))


def make_model(kind, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, WIDTH), Block(), Block(), nn.Linear(WIDTH, 3)).to(dtype)
    if kind == "ddp":
        return DistributedDataParallel(model)
    for block in (model[1], model[2]):
        fully_shard(block)
    return fully_shard(model)


def make_batches(rank, num_steps, dtype=torch.float32):
    """Processes have batches of different sizes now and then."""
    generator = torch.Generator().manual_seed(1000 + rank)
    sizes = [8 if step % 4 else 6 + 2 * (rank % 2) for step in range(num_steps)]
    return [
        (
            torch.randn(size, 4, generator=generator, dtype=dtype),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for size in sizes
    ]


def mean_loss(model, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


class Disturbed:
    """A guarded run in which one process at a time runs out of memory, at random points.

    Args:
        kind: "ddp" or "fsdp".
        seed: of the schedule; the same on all processes.
    """

    def __init__(self, kind, seed, rank, num_ranks, num_steps):
        self.model = make_model(kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.guard = memfit.Guard(
            self.model,
            self.optimizer,
            plan=None,
            clip_norm=0.5,
            accumulate=1,
            options=memfit.GuardOptions(remember=False, grow_after=1),
        )
        self._injected = Faults({})
        transaction = self.guard._loop.transaction
        self._announce(transaction, "finish")
        self._announce(transaction, "commit")
        self._record(self.guard)
        self._draw = random.Random(seed)
        self._rank, self._num_ranks = rank, num_ranks
        self.settings, self.raised = [], []
        torch.manual_seed(50 + rank)
        for batch in make_batches(rank, num_steps):
            self._step(batch)

    def _announce(self, transaction, name):
        method = getattr(transaction, name)

        def announced(*args):
            self._injected.phase = name
            try:
                return method(*args)
            finally:
                self._injected.phase = ""

        setattr(transaction, name, announced)

    def _record(self, guard):
        """Notes what each step really runs with; the last try is the one that counts."""
        settings_of = guard._driver.settings_of

        def recorded(batch):
            self._used = settings_of(batch)
            return self._used

        guard._driver.settings_of = recorded

    def _step(self, batch):
        victim = self._draw.randrange(self._num_ranks)
        phase = self._draw.choice(sorted(PHASES))
        index = self._draw.randrange(PHASES[phase])
        is_hit = self._draw.random() < 0.7 and victim == self._rank
        self._injected.schedule = {phase: {index}} if is_hit else {}
        for name in PHASES:
            self._injected.begin(name)
        self._injected.phase = ""

        def loss(model, batch):
            self._injected.phase = "forward"
            value = mean_loss(model, batch)
            self._injected.phase = "backward"
            return value

        with self._injected:
            self.guard.step(loss, batch)
        self.settings.append(self._used)
        self.raised += [list(event[:2]) for event in self._injected.raised]
        self._injected.raised.clear()


def undisturbed(kind, rank, settings):
    """The model of a run with these settings, step by step, in which nothing fails."""
    model = make_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ranks = ranks_of(model)
    transaction = Transaction(
        model, optimizer, ranks, clip=lambda model: ranks.clip_norm(list(model.parameters()), 0.5)
    )
    torch.manual_seed(50 + rank)
    for batch, setting in zip(make_batches(rank, len(settings)), settings, strict=True):
        transaction.open(1)
        transaction.add(mean_loss, batch)
        assert transaction.run(lambda _, setting=setting: setting, again=False) is None
        assert transaction.finish() is None
        transaction.commit()
    transaction.close()
    return model


def difference_from_plain_loop(kind, rank):
    """Of the parameters after three updates in micro-batches, from those of an ordinary loop with whole batches."""
    # Batches of one size: an ordinary loop takes the mean over processes, whatever the sizes of their batches.
    batches = make_batches(rank, 4, torch.float64)[1:]
    found = []
    for is_guarded in (True, False):
        model = make_model(kind, torch.float64)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = memfit.Guard(
            model, optimizer, plan=None, clip_norm=0.5, options=memfit.GuardOptions(micro_batch_size=3, remember=False)
        )
        for batch in batches:
            if is_guarded:
                assert guard.step(mean_loss, batch).micro_batches == 3
                continue
            optimizer.zero_grad()
            mean_loss(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        found.append([whole(parameter.detach()).clone() for parameter in model.parameters()])
    return max(float((left - right).abs().max() / right.abs().max()) for left, right in zip(*found, strict=True))


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def digest(model, optimizer=None):
    """Of all values, to the bit."""
    found = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        found.update(whole(tensor.detach()).numpy().tobytes())
    for parameter in model.parameters() if optimizer is not None else ():
        for _, value in sorted(optimizer.state[parameter].items()):
            found.update(whole(value.detach()).numpy().tobytes())
    return found.hexdigest()

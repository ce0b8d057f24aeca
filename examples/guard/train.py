"""A training loop that goes on when memory runs out: `python examples/guard/train.py [LIMIT_MIB]`."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import memfit

try:
    import resource
except ImportError:
    # Windows has no such limits.
    resource = None

VOCABULARY, LENGTH, WIDTH, DEPTH, BATCH_SIZE, NUM_STEPS = 256, 128, 128, 4, 32, 6


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(DEPTH)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, mask, is_causal=True)
        return self.head(hidden)


def loss(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def make():
    torch.manual_seed(0)
    model = LanguageModel()
    # Text that counts up from a random letter: easy to learn.
    starts = torch.randint(VOCABULARY, (BATCH_SIZE * NUM_STEPS, 1))
    texts = (starts + torch.arange(LENGTH + 1)) % VOCABULARY
    loader = torch.utils.data.DataLoader(texts, BATCH_SIZE)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader


def train_plainly():
    model, optimizer, loader = make()
    for step, batch in enumerate(loader):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        print(f"  step {step}: loss {value.item():.4f}")
    return model


def train_guarded():
    model, optimizer, loader = make()
    guard = memfit.Guard(model, optimizer, remember=False)
    for step, batch in enumerate(guard.batches(loader)):
        result = guard.step(loss, batch)
        print(f"  step {step}: loss {result.loss.item():.4f}, {told(result)}")
    guard.close()
    return model


def told(result):
    settings = result.settings
    moves = [f"{result.micro_batches} micro-batches" if result.micro_batches > 1 else "whole batch"]
    moves += [f"{len(settings.checkpoint)} modules recomputed"] if settings.checkpoint else []
    return f"{' and '.join(moves)}, retries: {result.retries}"


def data_bytes():
    """The private memory of this process, as RLIMIT_DATA counts it; None where the system doesn't tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def limit_data(limit_bytes):
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def main():
    limit_mib = int(sys.argv[1]) if len(sys.argv) > 1 else 120
    torch.set_num_threads(1)
    model, _, loader = make()
    # Libraries take memory when they are first used.
    loss(model, next(iter(loader))[:1]).backward()
    del model, loader
    held = data_bytes()
    if resource is None or held is None:
        sys.exit("this example needs RLIMIT_DATA and /proc, which Linux has")
    before = resource.getrlimit(resource.RLIMIT_DATA)[0]

    limit_data(held + limit_mib * 2**20)
    print(f"a plain loop that may take {limit_mib} MiB:")
    try:
        train_plainly()
    except RuntimeError as error:
        print(f"  RuntimeError: {str(error).partition('] ')[2] or error}")

    print(f"the same loop with a guard, within the same {limit_mib} MiB:")
    try:
        guarded = train_guarded()
    except memfit.CannotFit as error:
        print(f"  {error}")
        sys.exit(error.exit_code)

    limit_data(before)
    print("the plain loop without a limit:")
    plain = train_plainly()
    pairs = zip(guarded.parameters(), plain.parameters(), strict=True)
    print(f"largest difference of the weights: {max((a - b).abs().max().item() for a, b in pairs):.1e}")


if __name__ == "__main__":
    main()

"""A training loop that goes on when memory runs out: `python examples/guard/train.py [LIMIT_MIB]`.

`train.py plain 0` and `train.py guard LIMIT_MIB` run one loop in this process; LIMIT_MIB is what it may take beyond
what the process holds when the loop begins, 0 for as much as there is.
"""

import subprocess
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

VOCABULARY, LENGTH, WIDTH, DEPTH, BATCH_SIZE, NUM_STEPS = 256, 128, 128, 4, 32, 4


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


def train_plainly(model, optimizer, loader):
    for step, batch in enumerate(loader):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        print(f"  step {step}: loss {value.item():.4f}")


def train_guarded(model, optimizer, loader):
    guard = memfit.Guard(model, optimizer, options=memfit.GuardOptions(remember=False))
    for step, batch in enumerate(guard.batches(loader)):
        result = guard.step(loss, batch)
        print(f"  step {step}: loss {result.loss.item():.4f}, {describe(result)}")
    guard.close()


def describe(result):
    parts = f"{result.micro_batches} micro-batches" if result.micro_batches > 1 else "whole batch"
    recomputed = len(result.settings.checkpoint)
    return parts + (f", {recomputed} modules recomputed" if recomputed else "") + f", retries: {result.retries}"


def limit_memory(limit_mib):
    """From now on, more memory than this can't be had: a request that goes too far fails."""
    status = Path("/proc/self/status")
    if resource is None or not status.exists():
        sys.exit("this example needs a limit on a process's data, which Linux has")
    held = next(line for line in status.read_text().splitlines() if line.startswith("VmData:"))
    limit_bytes = int(held.split()[1]) * 1024 + limit_mib * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, resource.RLIM_INFINITY))


def run_one(how, limit_mib):
    torch.set_num_threads(1)
    model, optimizer, loader = make()
    # Libraries take memory when they are first used.
    loss(model, next(iter(loader))[:1]).backward()
    if limit_mib:
        limit_memory(limit_mib)
    try:
        {"plain": train_plainly, "guard": train_guarded}[how](model, optimizer, loader)
    except memfit.CannotFit as error:
        print("\n".join(f"  {line}" for line in str(error).splitlines()))
        return error.exit_code
    return 0


def run_in_a_process(how, limit_mib):
    """The exit code; what the loop prints is shown, and of an error the last line."""
    words = [sys.executable, __file__, how, str(limit_mib)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    print(done.stdout, end="")
    if done.returncode == 1:
        print(f"  {done.stderr.rstrip().splitlines()[-1]}")
    return done.returncode


def main():
    if sys.argv[1:2] in (["plain"], ["guard"]):
        return run_one(sys.argv[1], int(sys.argv[2]))
    limit_mib = int(sys.argv[1]) if len(sys.argv) > 1 else 120
    print(f"a plain loop that may take {limit_mib} MiB:", flush=True)
    run_in_a_process("plain", limit_mib)
    print(f"the same loop with a guard, within the same {limit_mib} MiB:", flush=True)
    code = run_in_a_process("guard", limit_mib)
    if code == 0:
        print("the plain loop with as much memory as there is:", flush=True)
        run_in_a_process("plain", 0)
    return code


if __name__ == "__main__":
    sys.exit(main())

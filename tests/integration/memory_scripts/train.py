"""A plain or guarded training loop under a real limit of memory.

train.py MODEL plain|guard|planned OUT [LIMIT_MIB [PARTS...]]

LIMIT_MIB is what the loop may take beyond what the process holds when it begins. Writes the weights and the number of
micro-batches of each step; PARTS tell a plain loop how many parts to split each batch into.
"""

import json
import resource
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
STEPS = 4


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 128)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True) for _ in range(4)])
        self.head = nn.Linear(128, 256)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, mask, is_causal=True)
        return self.head(hidden)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.layers = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Conv2d(32, 32, 3, padding=1),
                    nn.BatchNorm2d(32),
                    nn.ReLU(),
                    nn.Conv2d(32, 32, 3, padding=1),
                    nn.BatchNorm2d(32),
                )
                for _ in range(6)
            ]
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images):
        hidden = self.stem(images)
        for layer in self.layers:
            hidden = F.relu(hidden + layer(hidden))
        return self.head(hidden.mean((2, 3)))


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 128)
        self.rnn = nn.LSTM(128, 256, 2, batch_first=True)
        self.head = nn.Linear(256, 256)

    def forward(self, tokens):
        return self.head(self.rnn(self.embedding(tokens))[0])


def loss(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def make(name):
    torch.manual_seed(0)
    model = {"gpt": Gpt, "resnet": ResNet, "lstm": Lstm}[name]()
    if name == "resnet":
        batches = [(torch.randn(32, 3, 64, 64), torch.randint(10, (32,))) for _ in range(STEPS)]
    else:
        length = 256 if name == "gpt" else 128
        size = 16 if name == "gpt" else 64
        tokens = [torch.randint(256, (size, length + 1)) for _ in range(STEPS)]
        batches = [(part[:, :-1], part[:, 1:]) for part in tokens]
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), batches


def data_bytes():
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))


def warm_up(model, batch):
    """Threads, allocators and kernels hold some memory from their first use on; a small step shows it."""
    small = tuple(tensor[:1] for tensor in batch)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    loss(model, small).backward()
    model.zero_grad()
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def main():
    name, how, out, *rest = sys.argv[1:]
    limit = int(rest[0]) if rest else 0
    parts = [int(part) for part in rest[1:]] or [1] * STEPS
    model, optimizer, batches = make(name)
    guard = None
    if how != "plain":
        import memfit

        guard = memfit.Guard(
            model, optimizer, plan="auto" if how == "planned" else None, options=memfit.GuardOptions(remember=False)
        )
    with torch.no_grad():
        warm_up_state = torch.get_rng_state()
    warm_up(model, batches[0])
    torch.set_rng_state(warm_up_state)
    if limit:
        limit_bytes = data_bytes() + limit * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, resource.RLIM_INFINITY))
    used, retries = [], []
    for step, batch in enumerate(batches):
        if guard is not None:
            result = guard.step(loss, batch)
            used.append(result.micro_batches)
            retries.append(result.retries)
            continue
        optimizer.zero_grad()
        split = zip(*(tensor.tensor_split(parts[step]) for tensor in batch), strict=True)
        for inputs, targets in split:
            value = loss(model, (inputs, targets))
            if len(inputs) != len(batch[0]):
                value = value * (len(inputs) / len(batch[0]))
            value.backward()
        optimizer.step()
        used.append(parts[step])
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    torch.save(model.state_dict(), out)
    print(json.dumps({"parts": used, "retries": retries}))


if __name__ == "__main__":
    main()

"""A plain training loop that knows nothing of memfit: `python examples/rescue/train.py [MIB]`."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, NUM_BLOCKS, LENGTH, BATCH_SIZE = 128, 6, 256, 16


def limit_memory(mebibytes):
    """Has the operating system refuse this process more data than it has by now and so many MiB."""
    import resource

    with open("/proc/self/status", encoding="ascii") as file:
        now = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (now + mebibytes * 2**20,) * 2)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, NUM_BLOCKS, enable_nested_tensor=False), nn.Linear(WIDTH, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if len(sys.argv) > 1:
        limit_memory(int(sys.argv[1]))
    for step in range(3):
        inputs = torch.randn(BATCH_SIZE, LENGTH, WIDTH)
        labels = inputs.sum(dim=(1, 2)).sign().clamp(0).long()
        loss = F.cross_entropy(model(inputs).mean(dim=1), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.9f}")
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(f"sum of the weights {total:.12f}")


if __name__ == "__main__":
    main()

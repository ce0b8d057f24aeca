"""A device for a few lines: which batch size still fits? `python examples/simulate/simulate.py [DEVICE]`."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import memfit


def make_model(width=768, depth=12, vocabulary=32_000):
    layer = nn.TransformerEncoderLayer(width, 12, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
    return nn.Sequential(
        nn.Embedding(vocabulary, width),
        nn.TransformerEncoder(layer, depth, enable_nested_tensor=False),
        nn.Linear(width, vocabulary),
    )


def train(model, optimizer, batch_size, length=512):
    """Two steps: only in the second do activations meet the optimizer's state."""
    for _ in range(2):
        tokens = torch.randint(32_000, (batch_size, length), device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def fits(model, optimizer, batch_size):
    try:
        train(model, optimizer, batch_size)
    except torch.OutOfMemoryError as error:
        print(f"batch {batch_size}: {str(error).split(' GPU')[0]}")
        return False
    finally:
        optimizer.zero_grad()
    return True


def main():
    name = sys.argv[1] if len(sys.argv) > 1 else "rtx-3060"
    model = make_model()
    before = model[2].weight.detach().clone()
    with memfit.simulate(name) as device:
        print(f"{torch.cuda.get_device_name()}, {torch.cuda.get_device_properties(0).total_memory / 2**30:.1f} GiB")
        model.cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        batch_size = 64
        while batch_size and not fits(model, optimizer, batch_size):
            batch_size //= 2
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        print(f"batch {batch_size}: {allocated / 2**30:.2f} GiB allocated, {reserved / 2**30:.2f} GiB reserved")

    for failure in device.failures:
        allocated = failure.allocated_bytes / 2**30
        print(f"out of memory at {failure.source}, in the {failure.phase} pass, with {allocated:.2f} GiB allocated")
    same = torch.equal(model[2].weight, before)
    print(f"afterwards: CUDA {torch.cuda.is_available()}, weights on {model[2].weight.device}, as before: {same}")


if __name__ == "__main__":
    main()

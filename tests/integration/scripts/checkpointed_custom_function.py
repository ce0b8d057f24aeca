"""A deep network with an activation of one's own (autograd.Function) and activation checkpointing."""

import argparse

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--channels", type=int, default=16)
parser.add_argument("--image-size", type=int, default=32)
parser.add_argument("--blocks", type=int, default=4)
parser.add_argument("--segments", type=int, default=2)
parser.add_argument("--reentrant", action="store_true")
parser.add_argument("--steps", type=int, default=3)


class MemoryEfficientSwish(torch.autograd.Function):
    """Keeps its input only and computes the sigmoid again in the backward pass."""

    @staticmethod
    def forward(ctx, i):
        ctx.save_for_backward(i)
        return i * torch.sigmoid(i)

    @staticmethod
    def backward(ctx, grad_output):
        (i,) = ctx.saved_tensors
        sigmoid_i = torch.sigmoid(i)
        return grad_output * (sigmoid_i * (1 + i * (1 - sigmoid_i)))


class StraightThroughRound(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, levels):
        ctx.levels = levels
        return torch.round(x * levels) / levels

    @staticmethod
    def backward(ctx, grad_output):
        return (grad_output.clamp(-1, 1), None) if ctx.needs_input_grad[0] else (None, None)


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 4 * channels, 1)
        self.conv2 = nn.Conv2d(4 * channels, 4 * channels, 3, padding=1, groups=4 * channels)
        self.conv3 = nn.Conv2d(4 * channels, channels, 1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        h = MemoryEfficientSwish.apply(self.conv1(x))
        h = MemoryEfficientSwish.apply(self.conv2(h))
        return x + self.dropout(self.conv3(h))


class DeepNet(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.stem = nn.Conv2d(3, args.channels, 3, padding=1)
        self.blocks = nn.Sequential(*[Block(args.channels) for _ in range(args.blocks)])
        self.tail = nn.ModuleList([Block(args.channels) for _ in range(2)])
        self.head = nn.Linear(args.channels, 10)
        self.segments, self.use_reentrant = args.segments, args.reentrant

    def forward(self, x):
        x = self.stem(x)
        x = checkpoint_sequential(self.blocks, self.segments, x, use_reentrant=self.use_reentrant)
        for block in self.tail:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        x = StraightThroughRound.apply(x.mean((2, 3)), 15)
        return self.head(x)


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = DeepNet(args).to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4)
    grad_norms = {}
    model.stem.register_full_backward_hook(lambda module, gi, go: grad_norms.update(stem=go[0].norm()))
    model.head.weight.register_hook(lambda grad: grad_norms.update(head=grad.norm().item()))
    for step in range(args.steps):
        x = torch.randn(args.batch_size, 3, args.image_size, args.image_size).to(device)
        y = torch.randint(10, (args.batch_size,)).to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f} " + " ".join(f"{k} {v:.4f}" for k, v in grad_norms.items()))


if __name__ == "__main__":
    main()

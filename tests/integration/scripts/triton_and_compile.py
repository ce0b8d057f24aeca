"""Trains a model that is compiled, whose output goes through a kernel of its own written for Triton.

Such a kernel needs a GPU: on a machine without one the script only runs as a dry run.
"""

import argparse

import torch
import triton
import triton.language as tl
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--compile-first", action="store_true")
args = parser.parse_args()


@triton.jit
def scale_kernel(source, target, factor, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    tl.store(target + offsets, factor * tl.load(source + offsets, mask=mask), mask=mask)


def launch(source, factor):
    target = torch.empty_like(source)
    scale_kernel[(triton.cdiv(source.numel(), 1024),)](source, target, factor, source.numel(), BLOCK=1024)
    return target


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, source):
        return launch(source.contiguous(), 2.0)

    @staticmethod
    def backward(ctx, grad):
        return launch(grad.contiguous(), 2.0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(256, 256)

    def forward(self, x):
        x = self.inner(x)
        for _ in range(4):
            x = torch.sin(x) * torch.cos(x) + 1
        return x


model = Model().cuda()
compiled = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if not args.compile_first:
    Scale.apply(torch.ones(8, device="cuda"))
for _ in range(6):
    x = torch.randn(args.batch_size, 256, device="cuda")
    loss = Scale.apply(compiled(x)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())

"""Uses an operator of its own that has a kernel for CUDA only and no rule for shapes."""

import argparse

import torch
from torch import Tensor, nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
args = parser.parse_args()


@torch.library.custom_op("zoo::fused_gate", mutates_args=(), device_types="cuda")
def fused_gate(x: Tensor, gate: Tensor) -> Tensor:
    import triton  # there is one on the machine with the GPU

    return triton.ops.gate(x, gate)


def backward(ctx, grad):
    x, gate = ctx.saved_tensors
    return grad * gate, grad * x


fused_gate.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Linear(64, 128).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    a, b = model(torch.randn(args.batch_size, 64, device=device)).chunk(2, dim=1)
    loss = fused_gate(a.contiguous(), b.sigmoid()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())

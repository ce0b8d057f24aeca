"""Compiles a CUDA kernel of its own when it starts."""

import argparse

import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
args = parser.parse_args()

SOURCE = """
#include <torch/extension.h>

__global__ void scale_kernel(const float* x, float* y, float factor, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = factor * x[i];
}

torch::Tensor scale(torch::Tensor x, double factor) {
  auto y = torch::empty_like(x);
  int n = x.numel();
  scale_kernel<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), factor, n);
  return y;
}
"""
extension = load_inline(
    name="scale_extension",
    cpp_sources="torch::Tensor scale(torch::Tensor x, double factor);",
    cuda_sources=SOURCE,
    functions=["scale"],
)

device = torch.device("cuda")
model = nn.Linear(64, 64).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(extension.scale(torch.randn(args.batch_size, 64, device=device), 2.0)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

"""Distributed data-parallel training that starts its own processes with torch.multiprocessing.spawn."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


class ToyModel(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net1 = nn.Linear(10, width)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(width, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def demo_basic(rank, world_size, args):
    print(f"Running basic DDP example on rank {rank}.")
    setup(rank, world_size, args.port)
    # On machines with GPUs the rank is the device: module.to(0), tensor.to(0).
    device = rank if torch.cuda.is_available() else "cpu"
    model = ToyModel(args.width).to(device)
    ddp_model = DDP(model, device_ids=[rank] if torch.cuda.is_available() else None)
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)
    for step in range(args.steps):
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(args.batch_size, 10).to(device))
        labels = torch.randn(args.batch_size, 5).to(device)
        loss = loss_fn(outputs, labels)
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item():.4f}")
    checkpoint_path = "model.checkpoint"
    if rank == 0:
        torch.save(ddp_model.state_dict(), checkpoint_path)
    dist.barrier()
    map_location = {"cuda:0": f"cuda:{rank}"}
    ddp_model.load_state_dict(torch.load(checkpoint_path, map_location=map_location, weights_only=True))
    cleanup()


def run_demo(demo_fn, world_size, args):
    mp.spawn(demo_fn, args=(world_size, args), nprocs=world_size, join=True)


parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=20)
parser.add_argument("--width", type=int, default=10)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--port", type=int, default=12355)
parser.add_argument("--world-size", type=int, default=None, help="number of devices by default")

if __name__ == "__main__":
    args = parser.parse_args()
    n_gpus = torch.cuda.device_count()
    run_demo(demo_basic, args.world_size or max(1, n_gpus), args)

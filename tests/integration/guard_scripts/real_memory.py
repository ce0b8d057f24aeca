"""Trains a sharded model in which one process has too little memory, for real: `real_memory.py DIRECTORY`.

The limit of the process leaves room for a few samples' activations, not for those of the batch.
"""

import json
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import memfit
from tests.integration.guard_scripts.training import digest
from tests.unit.frameworks.torch.guard.faults import data_bytes
from tests.unit.frameworks.torch.process_groups import leave

WIDTH, SAMPLES = 256, 8192


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)), nn.Linear(WIDTH, 1))
    for part in model:
        fully_shard(part)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    guard = memfit.Guard(model, optimizer, plan=None, options=memfit.GuardOptions(remember=False))
    batch = torch.randn(SAMPLES, WIDTH)
    # The first pass of few samples takes what is taken once.
    model(batch[:8]).square().mean().backward()
    optimizer.zero_grad()
    if rank == 1:
        # The activations of the batch take 72 MiB.
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + (40 << 20), resource.RLIM_INFINITY))
    results = [guard.step(lambda model, batch: model(batch).square().mean(), batch) for _ in range(3)]
    found = {
        "retries": [result.retries for result in results],
        "parts": [result.micro_batches for result in results],
        "sources": sorted({failure.source for result in results for failure in result.failures}),
        "loss": float(results[-1].loss),
    }
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found["digest"] = digest(model)
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    leave()


main()

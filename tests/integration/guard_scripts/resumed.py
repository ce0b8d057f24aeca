"""Trains with checkpoints, and goes on from the last: `resumed.py KIND STEPS FOLDER DIRECTORY`.

Each process writes what it has in the end into a file of its own.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import memfit
from tests.integration.guard_scripts.training import digest, make_batches, make_model, mean_loss
from tests.unit.frameworks.torch.process_groups import leave


def main():
    kind, num_steps, folder, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = make_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = memfit.Guard(
        model, optimizer, plan=None, checkpoint=folder, options=memfit.GuardOptions(checkpoint_every=1, remember=False)
    )
    resumed = digest(model, optimizer) if guard.resumed_from is not None else ""
    if guard.resumed_from is None:
        torch.manual_seed(50 + rank)
    batches = make_batches(rank, num_steps)
    for batch in guard.batches(batches):
        guard.step(mean_loss, batch)
    guard.close()
    found = {
        "resumed_from": guard.resumed_from,
        "resumed": resumed,
        "updates": guard.num_updates,
        "digest": digest(model, optimizer),
    }
    (directory / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    leave()


main()

"""Runs schedules of failures: `random_faults.py KIND FIRST_SEED LAST_SEED STEPS DIRECTORY`.

Each process writes a line of JSON for each schedule into a file of its own: what all of them print may be mixed up.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.integration.guard_scripts.training import Disturbed, digest, undisturbed


def main():
    kind, first, last, num_steps = sys.argv[1], *map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for seed in range(first, last):
        run = Disturbed(kind, seed, rank, num_ranks, num_steps)
        reference = undisturbed(kind, rank, run.settings)
        found = {
            "seed": seed,
            "rank": rank,
            "raised": run.raised,
            "parts": [setting.micro_batches for setting in run.settings],
            "digest": digest(run.model),
            "reference": digest(reference),
        }
        with (Path(sys.argv[5]) / f"{rank}.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")
    dist.barrier()
    dist.destroy_process_group()


main()

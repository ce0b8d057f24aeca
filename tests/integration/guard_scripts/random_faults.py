"""Runs schedules of failures: `random_faults.py FIRST_SEED LAST_SEED STEPS DIRECTORY KIND...`.

Each process writes a line of JSON for each schedule into a file of its own: what all of them print may be mixed up.
"""

import itertools
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.integration.guard_scripts.training import Disturbed, difference_from_plain_loop, digest, undisturbed
from tests.unit.frameworks.torch.process_groups import leave


def main():
    first, last, num_steps = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for kind, seed in itertools.product(sys.argv[5:], range(first, last)):
        run = Disturbed(kind, seed, rank, num_ranks, num_steps)
        found = {
            "kind": kind,
            "seed": seed,
            "raised": run.raised,
            "parts": [setting.micro_batches for setting in run.settings],
            "digest": digest(run.model),
            "reference": digest(undisturbed(kind, rank, run.settings)),
            "difference": difference_from_plain_loop(kind, rank) if seed == first else 0.0,
        }
        with (Path(sys.argv[4]) / f"{rank}.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")
    dist.barrier()
    leave()


main()

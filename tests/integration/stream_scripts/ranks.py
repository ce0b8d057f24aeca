"""One rank of several, started by torchrun: `ranks.py DATA WORKERS BATCHES DIRECTORY`.

Gives one epoch, then so many batches of the next, and writes what it gave and its state into a file of its own.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from tests.integration.stream_scripts.training import open_stream


def main():
    """Writes the file."""
    data, num_workers, num_batches, directory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    dist.init_process_group("gloo")
    loader = open_stream(data).loader(num_workers)
    epoch = [labels.tolist() for _, labels in loader]
    batches = iter(loader)
    begun = [next(batches)[1].tolist() for _ in range(num_batches)]
    found = {"length": len(loader), "epoch": epoch, "begun": begun, "state": loader.state_dict()}
    (directory / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    del batches
    dist.barrier()
    dist.destroy_process_group()


main()

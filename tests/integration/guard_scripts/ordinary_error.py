"""One process meets a mistake of the user in the middle of a pass: `ordinary_error.py KIND`."""

import sys

import torch
import torch.distributed as dist

import memfit
from tests.integration.guard_scripts.training import make_batches, make_model, mean_loss


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = make_model(sys.argv[1])
    guard = memfit.Guard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), plan=None, options=memfit.GuardOptions(remember=False)
    )

    def loss(model, batch):
        if rank == 1:
            raise KeyError("a mistake in the loss function")
        return mean_loss(model, batch)

    guard.step(loss, make_batches(rank, 1)[0])


main()

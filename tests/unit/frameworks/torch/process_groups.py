"""How processes of a group end in tests."""

import os
import sys

import torch.distributed as dist


def leave():
    """Leaves the group and ends this process without taking the interpreter down.

    Threads of gloo may still hold tensors then, and end the process by SIGABRT when they let go of them too late
    (https://github.com/pytorch/pytorch/pull/179291).
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

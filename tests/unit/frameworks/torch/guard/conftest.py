"""Fixtures of the tests of PyTorch's guard."""

import pytest
import torch.distributed as dist


@pytest.fixture
def one_process():
    """A group of processes with only this one in it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()

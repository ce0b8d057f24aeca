import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from memfit.adapters.torch.distributed_files import without_zeros
from memfit.adapters.torch.shape_only import is_shape_only
from tests.unit.adapters.torch.saving import dry_run, simulated

dcp = pytest.importorskip("torch.distributed.checkpoint")
MILLION = 10**6


@pytest.fixture
def two_ranks():
    """The first of two processes, of which the other doesn't exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with dry_run(tmp_path / "own", num_ranks=2) as run:
        yield run


class Application:
    """An object that says and takes its own state."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value, "weight": simulated(3)}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_what_one_of_several_ranks_holds_is_saved_and_found_again(two_ranks, run, tmp_path):
    # GIVEN a rank that holds a half of a model
    state = {"model": {"weight": simulated(MILLION, 1000)}, "step": 7, "application": Application("saved")}

    # WHEN it saves, and loads what it has saved
    dcp.save(state, checkpoint_id="folder")
    again = {"model": {"weight": simulated(MILLION, 1000)}, "step": 0, "application": Application("new")}
    dcp.load(again, checkpoint_id="folder")

    # THEN all but values is restored, and little was written, elsewhere
    assert (again["step"], again["application"].value) == (7, "saved")
    assert again["model"]["weight"].shape == (MILLION, 1000)
    assert os.path.getsize("folder/.metadata") < 10_000
    assert list(run.redirected) == [str(tmp_path / "folder" / ".metadata")]


def test_an_asynchronous_save_on_two_ranks(two_ranks, run):
    dcp.async_save({"step": 3, "weight": torch.zeros(MILLION)}, checkpoint_id="folder", process_group=None).result()

    again = {"step": 0, "weight": torch.zeros(MILLION)}
    dcp.load(again, checkpoint_id="folder")
    assert again["step"] == 3
    assert os.path.getsize("folder/.metadata") < 10_000


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_the_users_is_read_by_the_one_rank(tmp_path, monkeypatch):
    # GIVEN a checkpoint that a real training wrote
    monkeypatch.chdir(tmp_path)
    weight = torch.arange(4.0)
    dcp.save({"weight": weight, "step": 5}, checkpoint_id="real", no_dist=True)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # WHEN one rank of two reads it
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with dry_run(tmp_path / "own", num_ranks=2):
            state = {"weight": torch.zeros(4), "step": 0}
            dcp.load(state, checkpoint_id="real")
    finally:
        dist.destroy_process_group()

    # THEN values are there
    assert torch.equal(state["weight"], weight)
    assert state["step"] == 5


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_single_process_writes_pytorchs_own_format_elsewhere(tmp_path, monkeypatch, num_ranks):
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(3, 3)
    with dry_run(tmp_path / "own", num_ranks=num_ranks) as run:
        dcp.save({"model": model.state_dict(), "zeros": torch.zeros(MILLION), "step": 2}, checkpoint_id="folder")
        again = nn.Linear(3, 3)
        state = {"model": again.state_dict(), "zeros": torch.ones(MILLION), "step": 0}
        dcp.load(state, checkpoint_id="folder")

        # Values are kept, and zeros, which is what simulated tensors are on the host, take no room.
        assert torch.equal(again.weight, model.weight)
        assert (state["step"], state["zeros"].any().item()) == (2, False)
        assert os.path.getsize("folder/__0_0.distcp") < 100_000
        assert sorted(os.path.basename(path) for path in run.redirected) == [".metadata", "__0_0.distcp"]
    run.checkpoints.finish()
    assert not os.path.exists("folder")


def test_only_large_zeros_are_left_out():
    assert is_shape_only(without_zeros(torch.zeros(MILLION)))
    assert is_shape_only(without_zeros(torch.zeros(1000, 1000).t()))
    ones = torch.zeros(MILLION)
    ones[-1] = 1
    kept = (ones, torch.zeros(3), simulated(MILLION), nn.Parameter(torch.zeros(MILLION)), "text")
    assert all(without_zeros(value) is value for value in kept)

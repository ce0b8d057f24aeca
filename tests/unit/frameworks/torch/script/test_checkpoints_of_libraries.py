import builtins
import os
import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn

from memfit.frameworks.torch.script.checkpoints import Checkpoints, _without_zeros
from memfit.frameworks.torch.script.shape_only import is_shape_only
from tests.unit.frameworks.torch.saving import GPU, Places, dry_run, really, simulated

safetensors = pytest.importorskip("safetensors")
stored = pytest.importorskip("safetensors.torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

VALUES = torch.arange(6.0).view(2, 3)
MILLION = 10**6


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A file of the user's."""
    monkeypatch.chdir(tmp_path)
    stored.save_file({"weight": VALUES}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


@pytest.fixture
def run(path, tmp_path):
    before = path.read_bytes()
    with dry_run(tmp_path / "own") as run:
        yield run
    assert path.read_bytes() == before


def test_a_real_file_is_read_on_the_host_as_ever(run):
    assert torch.equal(stored.load_file("model.safetensors")["weight"], VALUES)
    with safetensors.safe_open("model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert type(file).__module__ == "builtins" or "safetensors" in type(file).__module__


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0])
def test_a_real_file_is_read_to_the_device_with_its_values(run, device):
    loaded = stored.load_file("model.safetensors", device=device)

    assert really(loaded["weight"]) == "meta"
    (shape, _, arrived, values), *others = run.places.arrived
    assert (shape, arrived, others) == ((2, 3), GPU, [])
    assert torch.equal(values, VALUES)


def test_tensors_are_read_to_the_device_one_by_one(run):
    with safetensors.safe_open("model.safetensors", framework="pt", device="cuda:0") as file:
        assert list(file.keys()) == ["weight"]
        assert run.places.arrived == []
        part = file.get_slice("weight")
        assert part.get_shape() == [2, 3]
        assert part[:1].shape == (1, 3)
        assert file.get_tensor("weight").shape == (2, 3)
    assert [shape for shape, *_ in run.places.arrived] == [(1, 3), (2, 3)]


def test_a_device_that_is_not_there(run):
    with pytest.raises(RuntimeError, match="CUDA device 1 but"):
        stored.load_file("model.safetensors", device="cuda:1")


def test_real_tensors_are_saved_elsewhere_with_their_values(run, path):
    stored.save_file({"weight": VALUES + 1}, "model.safetensors", metadata={"step": "1"})

    assert torch.equal(stored.load_file(path)["weight"], VALUES + 1)
    assert stored.load(path.read_bytes())["weight"][0, 0] == 1
    assert list(run.redirected) == [str(path)]
    with safetensors.safe_open("model.safetensors", framework="pt") as file:
        assert file.metadata() == {"step": "1"}


def test_simulated_tensors_are_saved_as_shapes(run, path):
    # WHEN a model of any size is saved
    state = {"weight": simulated(10**6, 10**6, dtype=torch.bfloat16), "host": VALUES.clone()}
    stored.save_file(state, "model.safetensors", metadata={"format": "pt"})

    # THEN the file is small, and what is read from it is zeros on the host
    assert path.stat().st_size < 10_000
    with safetensors.safe_open("model.safetensors", framework="pt") as file:
        assert (sorted(file.keys()), file.metadata()) == (["host", "weight"], {"format": "pt"})
        assert sorted(file.offset_keys()) == ["host", "weight"]
        part = file.get_slice("weight")
        assert (part.get_shape(), part.get_dtype()) == ([10**6, 10**6], "BF16")
        assert torch.equal(part[:2, :3], torch.zeros(2, 3, dtype=torch.bfloat16))
        assert torch.equal(file.get_tensor("host"), VALUES)
        assert torch.equal(file.get_slice("host")[1], VALUES[1])
    assert run.places.arrived == []


def test_simulated_tensors_come_back_on_the_device(run):
    stored.save_file({"weight": simulated(3, 4), "host": VALUES.clone()}, "model.safetensors")

    loaded = stored.load_file("model.safetensors", device="cuda")
    again = stored.load_file("model.safetensors", device="cuda")

    assert {name: really(tensor) for name, tensor in loaded.items()} == {"weight": "meta", "host": "meta"}
    assert loaded["weight"].untyped_storage()._cdata != again["weight"].untyped_storage()._cdata
    assert len(run.places.arrived) == 4


def test_a_slice_on_the_device_is_as_large_as_itself(run):
    stored.save_file({"weight": simulated(100, 4)}, "model.safetensors")

    with safetensors.safe_open("model.safetensors", framework="pt", device="cuda") as file:
        assert file.get_slice("weight")[:2].untyped_storage().nbytes() == 32


def test_models_with_tied_weights(run):
    # GIVEN
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("meta")
    model[1].weight = model[0].weight
    on_host = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    on_host[1].weight = on_host[0].weight

    # WHEN
    stored.save_model(model, "tied.safetensors")

    # THEN it is stored once, and can be loaded
    assert sorted(stored.load_file("tied.safetensors")) == ["0.bias", "0.weight", "1.bias"]
    assert stored.load_model(on_host, "tied.safetensors") == (set(), [])
    assert not on_host[0].weight.any()


def test_bytes(run):
    shapes, real = stored.save({"weight": simulated(3)}), stored.save({"weight": VALUES})

    assert torch.equal(stored.load(shapes)["weight"], torch.zeros(3))
    assert torch.equal(stored.load(real)["weight"], VALUES)


def test_torch_load_reads_both(run):
    assert torch.equal(torch.load("model.safetensors", map_location="cpu")["weight"], VALUES)
    stored.save_file({"weight": simulated(3)}, "model.safetensors")
    assert torch.equal(torch.load("model.safetensors")["weight"], torch.zeros(3))


def test_mistakes_are_reported_by_safetensors(run):
    with pytest.raises(ValueError, match="Expected a dict"):
        stored.save_file([simulated(3)], "model.safetensors")
    with pytest.raises(FileNotFoundError):
        stored.load_file("missing.safetensors")


def test_copies_that_others_took_are_replaced_and_act_no_longer_than_the_run(path, tmp_path, monkeypatch):
    # GIVEN a module that copied functions before the run, as transformers does, and one imported during it
    early = ModuleType("early")
    early.safe_open, early.safe_save_file = safetensors.safe_open, stored.save_file
    monkeypatch.setitem(sys.modules, "early", early)
    plain = safetensors.safe_open

    # WHEN
    with dry_run(tmp_path / "own") as run:
        early.safe_save_file({"weight": simulated(2)}, "model.safetensors")
        assert early.safe_open("model.safetensors", framework="pt").get_tensor("weight").tolist() == [0, 0]
        late = safetensors.safe_open

    # THEN
    assert list(run.redirected) == [str(path)]
    assert early.safe_open is plain
    assert torch.equal(late("model.safetensors", framework="pt").get_tensor("weight"), VALUES)


def test_without_safetensors_there_is_nothing_to_replace(tmp_path, monkeypatch):
    checkpoints = Checkpoints(None, lambda code, text: None, Places().put)
    plain = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("safetensors"):
            raise ImportError(name)
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)

    assert checkpoints._of_safetensors() == ([], {})


# torch.distributed.checkpoint


@pytest.fixture
def two_ranks():
    """The first of two processes, of which the other doesn't exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def rank(tmp_path, monkeypatch):
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


def test_what_one_of_several_ranks_holds_is_saved_and_found_again(two_ranks, rank, tmp_path):
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
    assert list(rank.redirected) == [str(tmp_path / "folder" / ".metadata")]


def test_a_rank_whose_files_nobody_else_sees_writes_into_a_folder_of_its_own(two_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with dry_run(tmp_path / "own", num_ranks=2, private=True):
        dcp.save({"weight": simulated(MILLION), "step": 7}, checkpoint_id="runs/unfinished")
        os.rename("runs/unfinished", "runs/step-7")
        again = {"weight": simulated(MILLION), "step": 0}
        dcp.load(again, checkpoint_id="runs/step-7")

    assert again["step"] == 7


def test_an_asynchronous_save_on_two_ranks(two_ranks, rank):
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
    assert not os.path.exists("folder")


def test_only_large_zeros_are_left_out():
    assert is_shape_only(_without_zeros(torch.zeros(MILLION)))
    assert is_shape_only(_without_zeros(torch.zeros(1000, 1000).t()))
    ones = torch.zeros(MILLION)
    ones[-1] = 1
    kept = (ones, torch.zeros(3), simulated(MILLION), nn.Parameter(torch.zeros(MILLION)), "text")
    assert all(_without_zeros(value) is value for value in kept)

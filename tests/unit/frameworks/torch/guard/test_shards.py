"""Runs of several processes, whose models are spread over them or copied."""

import errno
import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from memfit.core.guarding import BadCheckpoint
from memfit.frameworks.torch.guard import state


def make(kind, seed=0, width=4):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    if kind == "fsdp":
        fully_shard(model[0])
        fully_shard(model)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


class Shadow:
    """A moving average that is no module."""

    def __init__(self, value):
        self.weight = torch.tensor([value])

    def state_dict(self):
        return {"weight": self.weight}

    def load_state_dict(self, state):
        self.weight = state["weight"]


def train(run, steps=2):
    for _ in range(steps):
        run["model"](torch.randn(4, 3)).square().sum().backward()
        run["optimizer"].step()
        run["optimizer"].zero_grad()
        run["scheduler"].step()


def values(run):
    """Of everything that was saved, by name."""

    def whole(tensor):
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()

    model = getattr(run["model"], "module", run["model"])
    found = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in run["optimizer"].state[parameter].items():
            found[f"{name}.{key}"] = whole(value)
    found["lr"] = torch.tensor(run["optimizer"].param_groups[0]["lr"])
    return found


def are_equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh", "trained"])
@pytest.mark.usefixtures("one_process")
def test_a_run_goes_on_where_it_was(tmp_path, kind, is_fresh):
    # GIVEN a run that was saved
    run = make(kind)
    train(run)
    torch.manual_seed(7)
    state.save(tmp_path, **run, progress={"update": 2}, scaler=None, ema=None)
    expected, drawn = values(run), torch.rand(3)

    # WHEN another, which has an optimizer with or without state, takes over
    other = make(kind, seed=1)
    if not is_fresh:
        train(other, 1)
    progress = state.load(tmp_path, **other, scaler=None, ema=None)

    # THEN it is the same, random states included
    assert progress == {"update": 2}
    assert are_equal(values(other), expected)
    assert torch.equal(torch.rand(3), drawn)
    for each in (run, other):
        torch.manual_seed(3)
        train(each)
    assert are_equal(values(run), values(other))


def test_a_sharded_run_goes_on_without_processes(tmp_path, one_process):
    run = make("fsdp")
    train(run)
    state.save(tmp_path, **run)
    expected = values(run)
    dist.destroy_process_group()

    other = make("plain", seed=1)
    state.load(tmp_path, **other)

    assert are_equal(values(other), expected)


def test_a_process_on_its_own_needs_no_processes(tmp_path):
    run = make("plain")
    train(run)
    state.save(tmp_path, **run, progress={"update": 2})

    other = make("plain", seed=1)

    assert state.load(tmp_path, **other) == {"update": 2}
    assert are_equal(values(other), values(run))


@pytest.mark.usefixtures("one_process")
def test_nothing_is_unpickled(tmp_path, monkeypatch):
    run = make("fsdp")
    train(run)
    state.save(tmp_path, **run)

    def refuse(*_, **__):
        raise AssertionError("something was unpickled")

    monkeypatch.setattr("pickle.load", refuse)
    monkeypatch.setattr("pickle.Unpickler", refuse)
    monkeypatch.setattr("torch.load", refuse)

    state.load(tmp_path, **make("fsdp", seed=1))
    assert not list(tmp_path.rglob("*.metadata"))
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".json", ".safetensors"}


@pytest.mark.usefixtures("one_process")
def test_moving_averages_are_kept(tmp_path):
    for ema, average in ((nn.Linear(2, 2), nn.Linear(2, 2)), (Shadow(2.0), Shadow(0.0))):
        directory = tmp_path / type(ema).__name__
        directory.mkdir()
        run, other = make("fsdp"), make("fsdp", seed=1)
        train(run)
        state.save(directory, **run, ema=ema)

        state.load(directory, **other, ema=average)

        assert torch.equal(average.weight, ema.weight)


@pytest.mark.usefixtures("one_process")
def test_another_model_is_refused_before_anything_changes(tmp_path):
    run = make("fsdp")
    train(run)
    state.save(tmp_path, **run)
    other = make("fsdp", seed=1, width=5)
    train(other)
    before = values(other)

    with pytest.raises(BadCheckpoint, match=r"'0.weight' is float32 \[4, 3\] in it and float32 \[5, 3\] here"):
        state.load(tmp_path, **other)

    assert are_equal(values(other), before)


@pytest.mark.usefixtures("one_process")
def test_another_optimizer_is_refused(tmp_path):
    run = make("fsdp")
    train(run)
    state.save(tmp_path, **run)
    other = make("fsdp", seed=1)
    parameters = list(other["model"].parameters())

    for groups in ([{"params": parameters[:2]}, {"params": parameters[2:]}], [{"params": parameters[::-1]}]):
        with pytest.raises(BadCheckpoint, match="another optimizer"):
            state.load(
                tmp_path, model=other["model"], optimizer=torch.optim.AdamW(groups), scheduler=other["scheduler"]
            )


@pytest.mark.usefixtures("one_process")
def test_a_checkpoint_of_a_model_that_was_not_sharded_is_refused(tmp_path):
    state.save(tmp_path, **make("plain"))

    with pytest.raises(BadCheckpoint, match="not sharded"):
        state.load(tmp_path, **make("fsdp"))


@pytest.mark.parametrize("content", [None, "no JSON", "[]", '{"format": "other"}'])
@pytest.mark.usefixtures("one_process")
def test_damage_is_named(tmp_path, content):
    run = make("fsdp")
    state.save(tmp_path, **run)
    path = tmp_path / "state.json"
    path.unlink() if content is None else path.write_text(content)

    with pytest.raises(BadCheckpoint):
        state.load(tmp_path, **run)


@pytest.mark.usefixtures("one_process")
def test_as_many_processes_have_their_own_progress_others_that_of_the_first(tmp_path):
    run = make("fsdp")
    state.save(tmp_path, **run, progress={"position": 5})
    path = tmp_path / "state.json"
    tree = json.loads(path.read_text())
    path.write_text(json.dumps({**tree, "num_processes": 2}))
    torch.manual_seed(11)

    assert state.load(tmp_path, **run) == {"position": 5}
    # Random states of another number of processes are of no use.
    assert torch.initial_seed() == 11


@pytest.mark.usefixtures("one_process")
def test_a_full_disk_is_an_error_of_the_system(tmp_path, monkeypatch):
    def save(*_, **__):
        raise distributed_checkpoint.api.CheckpointException("write", {1: (OSError(errno.ENOSPC, "full"), None)})

    monkeypatch.setattr(distributed_checkpoint, "save", save)

    with pytest.raises(OSError, match="full, on process 1"):
        state.save(tmp_path, **make("fsdp"))

"""Values of a model in a file, and back."""

import os

import pytest
import torch
from torch import nn

from memfit.core.errors import BadFile, BadModel
from memfit.core.guarding import BadCheckpoint
from memfit.frameworks.torch.guard.parameters import read, write


class Tied(nn.Module):
    def __init__(self, seed, tie=True):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.head = nn.Embedding(7, 5), nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(5)
        self.norm.running_mean.normal_()
        self.register_buffer("whole", torch.randn(6, 4))
        self.register_buffer("part", self.whole[2:4])
        self.register_buffer("turned", torch.randn(3, 2).t())
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("bits", torch.randn(3, dtype=torch.bfloat16))
        if tie:
            self.head.weight = self.embedding.weight


def same(one, other):
    state = other.state_dict()
    return all(torch.equal(value, state[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("tie", [True, False])
def test_values_come_back_exactly(tmp_path, tie):
    model, other = Tied(0), Tied(1, tie)
    assert not same(model, other)

    write(model, tmp_path / "model.safetensors")
    read(other, tmp_path / "model.safetensors")

    assert same(model, other)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_shared_tensors_are_written_once(tmp_path):
    model = nn.ModuleList([nn.Linear(256, 256, bias=False)] * 4)

    write(model, tmp_path / "file")

    assert os.path.getsize(tmp_path / "file") < 1.1 * 256 * 256 * 4


def test_files_of_safetensors_itself_are_read(tmp_path):
    from safetensors.torch import save_file

    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    save_file(model.state_dict(), tmp_path / "file")

    read(other, tmp_path / "file")

    assert same(model, other)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Linear(4, 2), r"'weight' is float32 \[2, 3\] in it and float32 \[2, 4\] here"),
        (nn.Linear(3, 2).half(), r"'weight' is float32 \[2, 3\] in it and float16 \[2, 3\] here"),
        (nn.Linear(3, 2, bias=False), r"'bias', float32 \[2\] in it, isn't in the model here"),
        (nn.Sequential(nn.Linear(3, 2)), r"'0.weight', float32 \[2, 3\] here, isn't in it"),
    ],
)
def test_the_file_of_another_model_is_refused_and_changes_nothing(tmp_path, other, message):
    write(nn.Linear(3, 2), tmp_path / "file")
    before = {name: value.clone() for name, value in other.state_dict().items()}

    with pytest.raises(BadCheckpoint, match=f"is of another model: {message}"):
        read(other, tmp_path / "file")

    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_a_damaged_or_missing_file_is_refused(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(BadCheckpoint, match=r"can't be read|no safetensors file"):
        read(nn.Linear(3, 2), path)
    write(nn.Linear(3, 2), path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(BadCheckpoint, match=r"can't be read|no safetensors file"):
        read(nn.Linear(3, 2), path)


def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write(nn.Linear(3, 2), path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(BadFile, match=r"can't be written to .*No space left on device.*What was there before stays"):
        write(nn.Linear(3, 2), path)

    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
    with pytest.raises(BadFile, match="can't be written"):
        write(nn.Linear(3, 2), tmp_path / "missing" / "file")


class WithExtra(nn.Linear):
    extra = None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_what_a_module_keeps_beside_its_tensors_comes_back(tmp_path):
    model, other = WithExtra(2, 2), WithExtra(2, 2)
    model.extra = {"scales": (1.5, torch.ones(3))}

    write(model, tmp_path / "file")
    read(other, tmp_path / "file")

    assert other.extra["scales"][0] == 1.5
    assert torch.equal(other.extra["scales"][1], torch.ones(3))


def test_parameters_are_given_to_models_alone(tmp_path):
    """What is wrong is the argument, and not the file."""
    write(nn.Linear(2, 2), tmp_path / "kept.safetensors")

    with pytest.raises(BadModel, match=r"expected a torch\.nn\.Module, but dict was given"):
        read({}, tmp_path / "kept.safetensors")


def test_what_is_no_model_or_can_not_be_written_without_pickle_is_refused(tmp_path):
    with pytest.raises(BadModel, match=r"expected a torch\.nn\.Module, but dict was given"):
        write({}, tmp_path / "file")
    model = WithExtra(2, 2)
    model.extra = object()
    with pytest.raises(BadCheckpoint, match=r"_extra_state is a builtins\.object, which a checkpoint can't hold"):
        write(model, tmp_path / "file")
    assert not list(tmp_path.iterdir())

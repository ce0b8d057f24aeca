import importlib.util
import io
import os
import pathlib
import pickle
import shutil
import subprocess
import sys

import numpy
import pytest
import torch
from torch import nn

from memfit.core.patching import replaced
from memfit.core.redirected_files import KEPT, REDIRECTED
from memfit.frameworks.torch.script import checkpoints
from memfit.frameworks.torch.script.checkpoints import OVERWRITTEN, Checkpoints
from tests.unit.frameworks.torch.saving import Places, dry_run, really, simulated

THE_USERS = b"the user's"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with files of the user's in it."""
    folder = tmp_path / "here"
    folder.mkdir()
    for name in ("model.pt", "checkpoint.pth.tar", "model_best.pth.tar", "weights.h5", "script.pt"):
        (folder / name).write_bytes(THE_USERS)
        os.utime(folder / name, (1, 1))
    torch.save({"weight": torch.arange(6.0)}, folder / "real.pt")
    os.utime(folder / "real.pt", (1, 1))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def run(here, tmp_path):
    before = {path: path.read_bytes() for path in here.iterdir()}
    with dry_run(tmp_path / "own") as run:
        yield run
    # Whatever a test did: the folder holds what it held.
    assert {path: path.read_bytes() for path in before} == before


def test_data_that_are_mapped_for_writing_are_not_copied(here, tmp_path, monkeypatch):
    # GIVEN data larger than what may be copied into an overlay, and smaller ones
    monkeypatch.setattr(checkpoints, "_MAX_COPIED_BYTES", 8)
    (here / "large.bin").write_bytes(bytes(16))
    (here / "small.bin").write_bytes(bytes(8))
    plain = numpy.memmap.__dict__["__new__"]

    # WHEN both are mapped as numpy does by default, and changed
    with dry_run(tmp_path / "own", private=True):
        for name in ("large.bin", "small.bin"):
            mapped = numpy.memmap(name)
            mapped[:] = 7
            mapped.flush()
            assert mapped.sum() == 7 * len(mapped)
            del mapped

    # THEN the large file has not been opened for writing
    assert (here / "large.bin").read_bytes() == bytes(16)
    assert (here / "small.bin").read_bytes() == bytes([7] * 8)
    assert numpy.memmap.__dict__["__new__"] is plain


def model_on_device():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to("meta")


@pytest.mark.parametrize("path", ["model.pt", pathlib.Path("model.pt"), "no_suffix"], ids=str)
def test_a_checkpoint_is_saved_elsewhere_and_found_again(run, here, path):
    torch.save({"model": model_on_device().state_dict(), "epoch": 3}, path)

    loaded = torch.load(path)
    assert (loaded["epoch"], really(loaded["model"]["0.weight"])) == (3, "meta")
    assert os.path.exists(path)
    assert list(run.redirected) == [str(here / path)]
    assert run.redirected[str(here / path)].startswith(str(run.folder))
    assert set(run.codes()) == {REDIRECTED}
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.save(1, "missing/folder/model.pt")


def test_real_tensors_keep_their_values(run):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()

    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")

    loaded = torch.load("model.pt")
    assert torch.equal(loaded["model"]["weight"], model.weight)
    assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert run.places.arrived == []


def test_the_training_can_be_resumed_from_what_it_saved(run):
    # GIVEN
    model = model_on_device()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.empty_like(parameter)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pth.tar")

    # WHEN it is loaded to the device
    loaded = torch.load("checkpoint.pth.tar", map_location="cuda")
    model.load_state_dict(loaded["model"])

    # THEN it took there what it would have taken
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert run.places.num_bytes == 2 * parameters + buffers


def test_the_imagenet_example(run):
    torch.save({"state_dict": model_on_device().state_dict()}, "checkpoint.pth.tar")
    shutil.copyfile("checkpoint.pth.tar", "model_best.pth.tar")

    best = torch.load("model_best.pth.tar", map_location="cpu")
    assert torch.equal(best["state_dict"]["0.weight"], torch.zeros(3, 4))
    assert len(run.redirected) == 2


@pytest.mark.parametrize("library", ["torch", "pickle"])
def test_a_file_that_the_script_opens_itself(run, library):
    dump, load = (torch.save, torch.load) if library == "torch" else (pickle.dump, pickle.load)
    with open("model.pt", "wb") as file:
        dump({"weight": simulated(3)}, file)

    with open("model.pt", "rb") as file:
        loaded = load(file)
    assert (loaded["weight"].shape, really(loaded["weight"])) == ((3,), "meta")
    assert run.codes() == [REDIRECTED]


def test_a_file_that_is_open_when_the_run_begins(here, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "elsewhere")
    with open("model.weights", "wb") as file, dry_run(tmp_path / "own") as run:
        torch.save({"weight": torch.ones(3)}, file)
        assert run.codes() == []
        torch.save({"weight": simulated(3)}, file)

    assert run.codes() == [OVERWRITTEN]
    assert "model.weights" in run.notes[0][1]


def test_a_buffer_works_in_place(run):
    buffer = io.BytesIO()
    torch.save(simulated(3), buffer)
    buffer.seek(0)

    assert torch.load(buffer, map_location="cpu").tolist() == [0, 0, 0]
    assert run.redirected == {}


def test_devices_are_no_files(run):
    torch.save(simulated(3), os.devnull)
    assert run.redirected == {}


@pytest.mark.parametrize("mmap", [None, True, False])
@pytest.mark.parametrize("map_location", [None, "cpu", "cuda", torch.device("cuda:0")], ids=str)
def test_a_file_of_the_users_is_loaded_as_it_is(run, map_location, mmap):
    loaded = torch.load("real.pt", map_location=map_location, mmap=mmap, weights_only=True)["weight"]

    values = run.places.arrived[0][3] if "cuda" in str(map_location) else loaded
    assert torch.equal(values, torch.arange(6.0))
    assert really(loaded) == ("meta" if "cuda" in str(map_location) else "cpu")


def test_what_was_saved_can_be_loaded_with_mmap(run):
    torch.save({"weight": simulated(3), "host": torch.ones(2)}, "model.pt")

    loaded = torch.load("model.pt", mmap=True, map_location="cpu")
    assert (loaded["weight"].tolist(), loaded["host"].tolist()) == ([0, 0, 0], [1, 1])


def test_weights_only_is_what_the_user_says(run):
    torch.save(model_on_device(), "model.pt")

    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load("model.pt")
    assert isinstance(torch.load("model.pt", weights_only=False), nn.Sequential)


def test_a_checkpoint_that_was_removed_cannot_be_loaded(run):
    os.remove("real.pt")

    with pytest.raises(FileNotFoundError):
        torch.load("real.pt")
    assert run.codes() == [KEPT]


def test_size_of_a_model_as_tutorials_measure_it(run):
    torch.save(nn.Linear(100, 100).state_dict(), "temp.p")
    size_bytes = os.path.getsize("temp.p")
    os.remove("temp.p")

    assert size_bytes > 40_000
    assert run.redirected == {}


def test_copies_of_torch_save_are_replaced(run):
    # torch.serialization.save is the same function.
    torch.serialization.save(simulated(3), "model.pt")

    assert torch.serialization.load("model.pt").shape == (3,)
    assert len(run.redirected) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:'torch.load' received a zip file:UserWarning")
def test_scripted_modules(run):
    scripted = torch.jit.script(nn.Linear(2, 2))

    torch.jit.save(scripted, "script.pt")
    scripted.save("model.pt")

    assert torch.equal(torch.jit.load("script.pt", map_location="cpu").weight, scripted.weight)
    assert torch.equal(torch.load("model.pt", weights_only=False).weight, scripted.weight)
    assert len(run.redirected) == 2


def test_hdf5(here, request):
    # GIVEN
    h5py = pytest.importorskip("h5py")
    run = request.getfixturevalue("run")

    with h5py.File("weights.h5", "w") as file:
        file["kernel"] = [1, 2, 3]

    with h5py.File(here / "weights.h5") as file:
        assert list(file["kernel"]) == [1, 2, 3]
    with h5py.File(io.BytesIO(), "w") as file:
        file["kernel"] = [1]
    assert list(run.redirected) == [str(here / "weights.h5")]


def test_keras(here, tmp_path):
    # In a process of its own: the backend is chosen once.
    if not all(map(importlib.util.find_spec, ("keras", "h5py"))):
        pytest.skip("no keras")
    script = """
import keras, numpy
from tests.unit.frameworks.torch.saving import dry_run
with dry_run("own") as run:
    model = keras.Sequential([keras.layers.Dense(3)])
    model.build((None, 4))
    model.save("model.keras")
    model.save_weights("model.weights.h5")
    again = keras.saving.load_model("model.keras")
    assert numpy.array_equal(model.get_weights()[0], again.get_weights()[0])
    again.set_weights([value * 0 for value in model.get_weights()])
    again.load_weights("model.weights.h5")
    assert numpy.array_equal(model.get_weights()[0], again.get_weights()[0])
print(len(run.redirected))
"""
    (here / "model.keras").write_bytes(THE_USERS)
    environment = {**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": os.pathsep.join(sys.path)}

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)

    assert (done.stdout.strip(), done.returncode) == ("2", 0), done.stderr
    assert (here / "model.keras").read_bytes() == THE_USERS
    assert not (here / "model.weights.h5").exists()


def test_the_end_takes_along_what_is_no_checkpoint(here, tmp_path):
    # GIVEN a script that saves as transformers' Trainer does, beside an older checkpoint
    (here / "checkpoint-1").mkdir()
    (here / "checkpoint-1" / "trainer_state.json").write_bytes(THE_USERS)

    # WHEN
    with dry_run(tmp_path / "own") as run:
        for step in (1, 2):
            os.makedirs(f"checkpoint-{step}", exist_ok=True)
            torch.save(simulated(3), f"checkpoint-{step}/optimizer.pt")
            pathlib.Path(f"checkpoint-{step}/trainer_state.json").write_text(f"step {step}")
        assert pathlib.Path("checkpoint-1/trainer_state.json").read_text() == "step 1"
        shutil.rmtree("checkpoint-1")
        assert sorted(pathlib.Path().glob("checkpoint-*")) == [pathlib.Path("checkpoint-2")]

    # THEN nothing is left that could be taken for a checkpoint to resume from, but the user's
    assert [path.name for path in here.glob("checkpoint-*")] == ["checkpoint-1"]
    assert (here / "checkpoint-1" / "trainer_state.json").read_bytes() == THE_USERS
    assert KEPT in run.codes()


def test_everything_is_restored(tmp_path):
    # GIVEN all that the stand-ins belong to, imported before they are made
    Checkpoints(None, lambda code, text: None, Places().put).replacements()
    checkpoints = Checkpoints(None, lambda code, text: None, Places().put)
    stand_ins = checkpoints.replacements()
    owners = {id(owner): owner for owner, _, _ in stand_ins}
    before = {key: dict(vars(owner)) for key, owner in owners.items()}

    # WHEN
    with replaced(stand_ins):
        assert all(vars(owner)[name] is value for owner, name, value in stand_ins)

    # THEN
    assert {key: dict(vars(owner)) for key, owner in owners.items()} == before

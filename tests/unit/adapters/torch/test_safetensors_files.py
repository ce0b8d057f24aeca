import builtins
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from memfit.adapters.torch.file_functions import FileFunctions
from memfit.adapters.torch.redirected_files import RedirectedFiles
from memfit.adapters.torch.safetensors_files import SafetensorsFiles
from memfit.adapters.torch.shape_only import ShapeOnly
from tests.unit.adapters.torch.saving import GPU, Places, dry_run, really, simulated

safetensors = pytest.importorskip("safetensors")
stored = pytest.importorskip("safetensors.torch")

VALUES = torch.arange(6.0).view(2, 3)


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
    files = RedirectedFiles(str(tmp_path), lambda code, text: None)
    replaced_files = SafetensorsFiles(files, FileFunctions(files), ShapeOnly(Places().put))
    plain = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("safetensors"):
            raise ImportError(name)
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)

    assert replaced_files.replacements() == ([], [])

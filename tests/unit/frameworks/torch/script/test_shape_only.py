import io
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

from memfit.core.patching import Replacement, replaced
from memfit.frameworks.torch.script.shape_only import ShapeOnly, as_shape, checked_device, is_shape_only
from tests.unit.frameworks.torch.saving import GPU, Places, Shown, really, simulated


class Storing:
    """PyTorch's own torch.save and torch.load with shapes."""

    def __init__(self, **options):
        self.places = Places()
        self.shapes = ShapeOnly(self.places.put, **options)

    def saved(self, obj, **options):
        buffer = io.BytesIO()
        torch.save(obj, buffer, **options)
        buffer.seek(0)
        return buffer

    def loaded(self, buffer, map_location=None, keeps_shapes=False, **options):
        self.places.arrived.clear()
        buffer.seek(0)
        restoring = self.shapes.restoring(map_location, keeps_shapes=keeps_shapes)
        return torch.load(buffer, map_location=restoring, **options)

    def back(self, obj, map_location=None, **options):
        return self.loaded(self.saved(obj), map_location, **options)


@pytest.fixture
def storing():
    storing = Storing()
    devices = [
        Replacement(torch.cuda, "is_available", lambda: True),
        Replacement(torch.cuda, "device_count", lambda: 2),
        Replacement(torch.cuda, "current_device", lambda: 1),
    ]
    with replaced([*devices, *storing.shapes.replacements()]), Shown():
        yield storing


def test_what_has_values_and_what_has_not(storing):
    assert is_shape_only(simulated(3))
    assert is_shape_only(nn.Parameter(simulated(3)))
    assert not is_shape_only(torch.zeros(3))
    assert not is_shape_only("tensor")
    shape = as_shape(torch.zeros(3, 4).t())
    assert (shape.shape, shape.stride(), really(shape)) == ((4, 3), (1, 4), "meta")


@pytest.mark.parametrize(
    ("map_location", "device"),
    [
        (None, GPU),
        ("cuda", torch.device("cuda", 1)),
        ("cuda:0", GPU),
        (b"cuda:0", GPU),
        (torch.device("cuda"), torch.device("cuda", 1)),
        (torch.device("cuda", 1), torch.device("cuda", 1)),
        ({"cuda:0": "cuda:1"}, torch.device("cuda", 1)),
        ({"cuda:1": "cpu"}, GPU),
        (lambda storage, location: None, GPU),
        (lambda storage, location: storage.cuda(1), torch.device("cuda", 1)),
        (lambda storage, location: storage.cuda(), torch.device("cuda", 1)),
        (lambda storage, location: torch.serialization.default_restore_location(storage, "cuda:0"), GPU),
    ],
)
def test_a_simulated_tensor_comes_back_on_the_device(storing, map_location, device):
    tensor = storing.back({"weight": simulated(3, 4)}, map_location)["weight"]

    assert (tensor.shape, really(tensor)) == ((3, 4), "meta")
    assert [(shape, arrived) for shape, _, arrived, _ in storing.places.arrived] == [((3, 4), device)]


@pytest.mark.parametrize(
    "map_location",
    [
        "cpu",
        torch.device("cpu"),
        {"cuda:0": "cpu"},
        lambda storage, location: storage,
        lambda storage, location: storage.to(device="cpu"),
    ],
)
def test_a_simulated_tensor_is_zeros_on_the_host(storing, map_location):
    tensor = storing.back(simulated(3, 4, dtype=torch.bfloat16), map_location)

    assert torch.equal(tensor, torch.zeros(3, 4, dtype=torch.bfloat16))
    tensor.add_(1)
    assert storing.places.arrived == []


@pytest.mark.parametrize("map_location", [None, "cpu", lambda storage, location: storage])
def test_a_host_tensor_stays_what_it_is(storing, map_location):
    assert torch.equal(storing.back(torch.arange(3), map_location), torch.arange(3))
    assert storing.places.arrived == []


def test_a_host_tensor_moves_with_its_values(storing):
    tensor = storing.back({"step": torch.tensor(7.0)}, "cuda:0")["step"]

    (_, _, device, values), *others = storing.places.arrived
    assert (really(tensor), device, others) == ("meta", GPU, [])
    assert torch.equal(values, torch.tensor(7.0))


def test_a_file_from_a_real_gpu_goes_there_by_itself(storing, monkeypatch):
    # GIVEN a file whose tensor was on a GPU
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    buffer = storing.saved(torch.arange(3.0))

    # THEN it is loaded there, or where the user wants it
    assert really(storing.loaded(buffer)) == "meta"
    assert torch.equal(storing.places.arrived[0][3], torch.arange(3.0))
    assert torch.equal(storing.loaded(buffer, "cpu"), torch.arange(3.0))


def test_the_meta_device_is_nobodys_memory(storing):
    tensor = storing.back(simulated(3), "meta")

    assert (tensor.shape, really(tensor), storing.places.arrived) == ((3,), "meta", [])
    assert really(storing.back(torch.ones(3), "meta")) == "meta"


def test_a_device_that_is_not_there(storing):
    with pytest.raises(RuntimeError, match=r"CUDA device 2 but torch\.cuda\.device_count\(\) is 2"):
        storing.back(simulated(3), "cuda:2")
    assert checked_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("map_location", [None, "cpu", "cuda"])
def test_views_share_their_storage_again(storing, map_location):
    # GIVEN views of one storage, none of which is all of it
    base = simulated(4, 5)

    # WHEN
    loaded = storing.back({"turned": base.t()[1:], "row": base[2], "base": base}, map_location)

    # THEN they are views of one storage of that size, in the same order
    pointers = {tensor.untyped_storage()._cdata for tensor in loaded.values()}
    assert len(pointers) == 1
    assert loaded["base"].untyped_storage().nbytes() == 80
    assert (loaded["row"].storage_offset(), loaded["turned"].stride()) == (10, (1, 5))
    assert len(storing.places.arrived) == (0 if map_location == "cpu" else 1)
    if map_location == "cpu":
        loaded["base"].fill_(1)
        assert loaded["row"].sum() == 5


def test_views_of_a_real_tensor_share_one_allocation(storing):
    base = torch.arange(20.0).view(4, 5)

    loaded = storing.back([base[1], base], "cuda")

    assert loaded[0].untyped_storage()._cdata == loaded[1].untyped_storage()._cdata
    assert storing.places.num_bytes == 80


def test_memory_format_is_kept(storing):
    tensor = simulated(2, 3, 4, 4).to(memory_format=torch.channels_last)

    assert storing.back(tensor).stride() == tensor.stride()
    assert storing.back(tensor, "cpu").is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn],
)
@pytest.mark.parametrize("weights_only", [True, False])
def test_every_type_of_elements(storing, dtype, weights_only):
    buffer = storing.saved([simulated(3, dtype=dtype), torch.ones(3).to(dtype)])

    shape, real = storing.loaded(buffer, weights_only=weights_only)
    zeros, _ = storing.loaded(buffer, "cpu", weights_only=weights_only)

    assert (shape.dtype, really(shape), zeros.dtype, really(zeros)) == (dtype, "meta", dtype, "cpu")
    assert torch.equal(real.view(torch.uint8), torch.ones(3).to(dtype).view(torch.uint8))
    assert not zeros.view(torch.uint8).any()
    assert really(storing.loaded(buffer, "cuda", weights_only=weights_only)[1]) == "meta"


def test_empty_tensors(storing):
    assert storing.back(simulated(0, 3)).shape == (0, 3)
    assert storing.back(simulated(0, 3), "cpu").shape == (0, 3)


def test_the_file_is_small_and_so_is_what_comes_of_it(storing):
    # GIVEN more than any machine has
    tensor = simulated(2**40, dtype=torch.uint8)

    # WHEN
    buffer = storing.saved(tensor)

    # THEN it takes neither disk nor memory
    assert len(buffer.getvalue()) < 10_000
    assert storing.loaded(buffer, "cpu")[2**39] == 0


def test_parameters_stay_parameters(storing):
    parameter = nn.Parameter(simulated(3))
    parameter.note = "kept"

    loaded = storing.back({"first": parameter, "second": parameter, "frozen": nn.Parameter(simulated(2), False)})

    assert type(loaded["first"]) is nn.Parameter
    assert loaded["first"] is loaded["second"]
    assert (loaded["first"].requires_grad, loaded["first"].note, loaded["frozen"].requires_grad) == (
        True,
        "kept",
        False,
    )


def test_whole_modules(storing):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4), nn.Linear(4, 4)).to("meta")
    model[3].weight = model[2].weight

    loaded = storing.back(model, weights_only=False)

    assert [name for name, _ in loaded.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert loaded[3].weight is loaded[2].weight
    assert loaded.state_dict().keys() == model.state_dict().keys()


def test_weights_only_is_as_strict_as_ever(storing):
    buffer = storing.saved(nn.Linear(2, 2).to("meta"))

    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        storing.loaded(buffer, weights_only=True)


def test_state_of_optimizers(storing):
    # GIVEN moments as an optimizer has them
    weight = nn.Parameter(simulated(4))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = simulated(4)

    loaded = storing.back(optimizer.state_dict(), "cpu")

    assert torch.equal(loaded["state"][0]["momentum_buffer"], torch.zeros(4))
    assert loaded["param_groups"] == optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize("map_location", [None, "cpu", "cuda"])
def test_the_old_format(storing, map_location):
    state = OrderedDict(weight=simulated(3), host=torch.arange(3.0))
    buffer = storing.saved(state, _use_new_zipfile_serialization=False)

    loaded = storing.loaded(buffer, map_location)

    assert loaded["weight"].shape == (3,)
    assert really(loaded["weight"]) == ("cpu" if map_location == "cpu" else "meta")
    if map_location != "cuda":
        assert torch.equal(loaded["host"], torch.arange(3.0))
    else:
        # Values come last in that format: until then only the shape is known.
        assert [values for *_, values in storing.places.arrived] == [None, None]


def test_pickle_without_torch(storing, monkeypatch):
    restoring, plain = storing.shapes.restoring(None), torch.load
    monkeypatch.setattr(torch, "load", lambda file, weights_only: plain(file, restoring, weights_only=weights_only))

    loaded = pickle.loads(pickle.dumps({"weight": simulated(3), "host": torch.arange(3)}))

    assert (loaded["weight"].shape, really(loaded["weight"])) == ((3,), "meta")
    assert torch.equal(loaded["host"], torch.arange(3))


def test_shapes_can_be_kept_as_they_are(storing):
    loaded = storing.back({"shape": simulated(3), "host": torch.ones(2)}, keeps_shapes=True)

    assert (really(loaded["shape"]), really(loaded["host"])) == ("meta", "cpu")
    assert storing.places.arrived == []


def test_what_the_user_made_on_the_meta_device_is_no_simulated_tensor():
    storing = Storing(device_of=lambda tensor: torch.device("meta"))
    with replaced(storing.shapes.replacements()):
        assert storing.back(torch.empty(3, device="meta")).is_meta
    assert storing.places.arrived == []
    assert storing.shapes.num_stored == 0


def test_each_stored_shape_is_counted(storing):
    storing.saved([simulated(2), torch.ones(2), simulated(3)])
    assert storing.shapes.num_stored == 2


def test_outside_of_a_simulation_the_file_is_refused(storing):
    buffer = storing.saved(simulated(3))

    with pytest.raises(RuntimeError, match="tagged with memfit-shape-only:cuda:0:12"):
        torch.load(buffer)


def test_hooks_are_left_out_with_a_warning(storing):
    weight = simulated(3, requires_grad=True)
    weight.register_hook(lambda gradient: gradient)

    with pytest.warns(UserWarning, match="will not be serialized"):
        storing.saved(weight)


class Wrapper(torch.Tensor):
    """A tensor that only wraps another, as DTensor does."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Wrapper(args[0].inner)
        raise NotImplementedError(func)


@pytest.mark.parametrize(
    ("saved", "map_location", "expected"),
    [
        ("meta", None, "meta"),
        ("meta", "cuda", "meta"),
        ("meta", torch.device("cuda"), "meta"),
        ("meta", "cpu", "cpu"),
        ("meta", {"cuda:0": "cpu"}, "cpu"),
        ("cpu", None, "cpu"),
        ("cpu", {"cuda:0": "cpu"}, "cpu"),
        ("cpu", "cuda", "meta"),
    ],
)
def test_a_wrapper_is_where_its_parts_are_and_never_on_a_real_gpu(storing, saved, map_location, expected):
    with torch._C.DisableTorchFunction():
        wrapper = Wrapper(torch.ones(3, device=saved))

    loaded = storing.back(wrapper, map_location, weights_only=False)

    assert type(loaded) is Wrapper
    assert (really(loaded), really(loaded.inner)) == (expected, expected)


def test_a_function_cannot_say_where_a_wrapper_goes(storing):
    with pytest.raises(RuntimeError, match="Callable map_location not supported"):
        storing.back(Wrapper(torch.ones(3)), lambda storage, location: storage, weights_only=False)


def test_pytorch_is_restored():
    owners = (torch.Tensor, torch.UntypedStorage, torch._utils, torch.serialization, torch._weights_only_unpickler)
    before = [dict(vars(owner)) for owner in owners]

    with replaced(ShapeOnly(Places().put).replacements()):
        assert [dict(vars(owner)) for owner in owners] != before

    assert [dict(vars(owner)) for owner in owners] == before

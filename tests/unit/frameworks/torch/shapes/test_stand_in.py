import collections
import dataclasses

import psutil
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from memfit.core.errors import BadModel, StepFailed
from memfit.core.timeline import Category
from memfit.core.units import GIB, MIB
from memfit.frameworks.torch.shapes.stand_in import (
    AS_SHAPES,
    LargeWeights,
    ShapeCopies,
    build_without_weights,
    check_model,
    map_tensors,
    swapped,
    tensors_in,
)
from tests.unit.frameworks.torch.sessions import codes, made, really, running


def test_a_copy_has_shape_strides_dtype_and_gradient_but_no_memory():
    for tensor in (
        torch.ones(2, 3),
        torch.ones(3, 2).t(),
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.ones(3, dtype=torch.int64),
        torch.ones(3, requires_grad=True),
        torch.ones(()),
    ):
        copy = ShapeCopies().of(tensor)
        assert copy.is_meta
        assert (copy.shape, copy.stride(), copy.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        assert copy.requires_grad is tensor.requires_grad


def test_a_view_with_gaps_gets_a_storage_of_its_own_size():
    copy = ShapeCopies().of(torch.ones(4, 8)[:, ::2])

    assert copy.untyped_storage().nbytes() == 4 * 4 * 4


def test_each_tensor_has_one_copy():
    copies, tensor = ShapeCopies(), torch.ones(3)

    assert copies.of(tensor) is copies.of(tensor)
    assert copies.known(tensor) is copies.of(tensor)
    assert copies.known(torch.ones(3)) is None
    assert copies.known("text") is None


def test_parameters_stay_parameters():
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    copy = ShapeCopies().of(frozen)

    assert isinstance(copy, nn.Parameter)
    assert not copy.requires_grad


def test_a_precision_is_for_floating_point_only():
    copies = ShapeCopies(torch.float16)

    assert copies.of(torch.ones(3)).dtype is torch.float16
    assert copies.of(torch.ones(3, dtype=torch.float64)).dtype is torch.float16
    assert copies.of(torch.ones(3, dtype=torch.int64)).dtype is torch.int64
    assert copies.of(torch.ones(3, dtype=torch.bool)).dtype is torch.bool


def test_sparse_tensors_are_copied_too():
    assert ShapeCopies().of(torch.eye(3).to_sparse()).layout is torch.sparse_coo


Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: str


class Wrapped(collections.abc.MutableMapping):
    """A mapping that keeps a dict inside, as many libraries have them."""

    def __init__(self, inner):
        self.inner = inner

    def __getitem__(self, key):
        return self.inner[key]

    def __setitem__(self, key, value):
        self.inner[key] = value

    def __delitem__(self, key):
        del self.inner[key]

    def __iter__(self):
        return iter(self.inner)

    def __len__(self):
        return len(self.inner)


class Frozen(collections.abc.Mapping):
    """A mapping that can't be changed."""

    def __init__(self, inner):
        self._inner = inner

    def __getitem__(self, key):
        return self._inner[key]

    def __iter__(self):
        return iter(self._inner)

    def __len__(self):
        return len(self._inner)


ONE = torch.ones(1)


@pytest.mark.parametrize(
    "batch",
    [
        ONE,
        [ONE, ONE],
        (ONE, "text", 3),
        {"a": ONE, "b": [ONE]},
        collections.OrderedDict(a=ONE),
        collections.UserDict(a=ONE),
        collections.defaultdict(list, a=ONE),
        Pair(ONE, {"deep": (ONE,)}),
        Sample(ONE, "cat"),
        Wrapped({"a": ONE}),
        None,
        "text",
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_containers_keep_their_type_and_the_original_its_tensors(batch):
    before = list(tensors_in(batch))

    mapped = map_tensors(batch, lambda tensor: tensor + 1)

    assert type(mapped) is type(batch)
    assert [tensor.item() for tensor in tensors_in(mapped)] == [2.0] * len(before)
    assert all(a is b for a, b in zip(tensors_in(batch), before, strict=True))
    assert all(tensor.item() == 1.0 for tensor in before)


def test_a_mapping_that_cannot_be_changed_becomes_a_dict():
    mapped = map_tensors(Frozen({"a": ONE}), lambda tensor: tensor + 1)

    assert mapped == {"a": torch.tensor([2.0])}


def test_other_fields_of_a_dataclass_are_kept():
    assert map_tensors(Sample(ONE, "cat"), lambda tensor: tensor).name == "cat"


def test_a_packed_sequence_keeps_its_batch_sizes():
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])

    mapped = map_tensors(packed, ShapeCopies().of)

    assert isinstance(mapped, PackedSequence)
    assert mapped.data.is_meta
    assert mapped.batch_sizes.tolist() == [2, 1, 1]


class Caching(nn.Module):
    """A module of the careless kind: its forward pass leaves traces everywhere."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("steps", torch.zeros(()))
        self.plain = torch.ones(2)
        self.table = {"inner": {"key": None}}
        self.history = collections.deque([1])
        self.names = {"first"}
        self.pair = ([1], 2)
        self.helper = Helper()


class Helper:
    def __init__(self):
        self.cache = {}
        self.last = None


def describe(module):
    """Everything in a module, deep enough to see what a forward pass can change."""
    return {
        name: (
            {k: dict(v) if isinstance(v, dict) else v for k, v in value.items()}
            if isinstance(value, dict)
            else list(value)
            if isinstance(value, collections.deque | list)
            else set(value)
            if isinstance(value, set)
            else {k: dict(v) if isinstance(v, dict) else v for k, v in vars(value).items()}
            if isinstance(value, Helper)
            else repr(value)
            if isinstance(value, tuple)
            else value
        )
        for name, value in vars(module).items()
    }


def disturb(model):
    """What a careless forward pass may do."""
    model.new_attribute = 3
    model.table["inner"]["key"] = "value"
    model.table["other"] = 1
    model.history.append(2)
    model.names.add("second")
    model.pair[0].append(2)
    model.helper.cache["k"] = 1
    model.helper.last = 2
    model.steps = torch.ones(())
    model.register_buffer("late", torch.zeros(2))
    model.extra = nn.Linear(2, 2)
    model.layer.weight = nn.Parameter(torch.zeros(2, 2))
    model.register_forward_hook(lambda *arguments: None)
    model.layer.eval()
    del model.plain


def identities(model):
    return {name: id(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def test_inside_there_are_shapes_and_outside_everything_is_as_before():
    model = Caching()
    before, held = describe(model), identities(model)

    with swapped(model, ShapeCopies()):
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        disturb(model)

    assert describe(model) == before
    assert identities(model) == held
    assert model.layer.training


def test_everything_is_as_before_after_an_error():
    model = Caching()
    before = describe(model)

    with pytest.raises(KeyError), swapped(model, ShapeCopies()):
        disturb(model)
        raise KeyError

    assert describe(model) == before


def test_parameters_in_lists_are_swapped_as_well():
    model = nn.LSTM(2, 3)
    before = list(model._flat_weights)
    with swapped(model, ShapeCopies()):
        assert all(weight is getattr(model, name) for name, weight in zip(*flat(model), strict=True))
    assert all(a is b for a, b in zip(model._flat_weights, before, strict=True))


def flat(model):
    return model._flat_weights_names, model._flat_weights


def test_a_parameter_under_two_names_has_one_copy():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight = model[0].weight

    with swapped(model, ShapeCopies()):
        assert model[1].weight is model[0].weight


def test_a_module_on_two_devices_is_refused():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    check_model(model)  # meta counts as anywhere

    class Elsewhere:
        device = torch.device("cuda", 1)

    class Mixed(nn.Linear):
        def buffers(self, recurse=True):
            return iter([Elsewhere()])

    with pytest.raises(BadModel, match="mixed devices: cpu, cuda:1"):
        check_model(Mixed(2, 2))


def test_a_model_without_shapes_is_refused():
    with pytest.raises(BadModel, match=r"without a shape yet .*nn\.LazyLinear"):
        check_model(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_model_is_refused():
    with pytest.raises(BadModel, match="TorchScript"):
        check_model(nn.Sequential(torch.jit.script(nn.ReLU())))


def resident_bytes():
    return psutil.Process().memory_info().rss


def test_a_model_of_ten_gigabytes_is_built_without_memory():
    before = resident_bytes()

    model = build_without_weights(lambda: nn.Sequential(*(nn.Linear(16_384, 16_384) for _ in range(10))))

    assert sum(p.numel() * p.element_size() for p in model.parameters()) > 10 * GIB
    assert resident_bytes() - before < 500 * MIB


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Embedding(100_000, 10_000),
        lambda: nn.Conv2d(4096, 4096, 9),
        lambda: nn.LSTM(8192, 8192),
        lambda: nn.MultiheadAttention(16_384, 2),
        lambda: nn.BatchNorm1d(400_000_000),
        lambda: nn.ParameterList([nn.Parameter(torch.randn(30_000, 30_000) * 0.02)]),
        lambda: nn.ParameterList([nn.Parameter(torch.zeros(size=(30_000, 30_000)))]),
        lambda: nn.ParameterList([nn.Parameter(torch.full((30_000, 30_000), 0.1))]),
        lambda: nn.init.xavier_uniform_(nn.Linear(30_000, 30_000).weight) is not None and nn.Linear(30_000, 30_000),
        lambda: nn.init.trunc_normal_(nn.Linear(30_000, 30_000).weight, std=0.02) is not None and nn.Identity(),
    ],
)
def test_initialising_costs_nothing(make):
    before = resident_bytes()

    build_without_weights(make)

    assert resident_bytes() - before < 500 * MIB


def test_small_tensors_stay_real_for_constructors_that_compute():
    class DropPaths(nn.Module):
        def __init__(self):
            super().__init__()
            self.rates = [rate.item() for rate in torch.linspace(0, 0.5, 6)]
            self.layer = nn.Linear(300, 300)

    model = build_without_weights(DropPaths)

    assert model.rates[-1] == 0.5
    assert model.layer.weight.is_meta
    assert not model.layer.bias.is_meta


def test_a_constructor_that_computes_with_large_tensors_is_run_as_usual():
    class Computed(nn.Module):
        def __init__(self):
            super().__init__()
            self.size = int(torch.ones(200, 200).sum().item())

    assert build_without_weights(Computed).size == 40_000


def test_a_builder_that_fails_says_its_own_error():
    def build():
        raise FileNotFoundError("no such checkpoint")

    with pytest.raises(StepFailed, match="FileNotFoundError: no such checkpoint") as caught:
        build_without_weights(build)

    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_builder_that_returns_something_else_is_refused():
    with pytest.raises(BadModel, match="returned int"):
        build_without_weights(lambda: 3)


def test_after_building_tensors_are_real_again():
    build_without_weights(lambda: nn.Linear(300, 300))

    assert not torch.empty(300, 300).is_meta
    assert not nn.Linear(300, 300).weight.is_meta


class Weight(nn.Module):
    """A module that asks about its weights while it is being built."""

    def __init__(self, ask, *size, **options):
        super().__init__()
        self.large = ask(size, options)


@pytest.fixture
def notes():
    return []


@pytest.fixture
def weights(notes):
    return LargeWeights(lambda code, text: notes.append((code, text)), 10 * MIB)


def test_weights_beyond_the_budget_are_shapes(weights, notes):
    sizes = [4 * MIB, 4 * MIB, 4 * MIB, 2 * MIB, 2 * MIB]
    found = [Weight(weights, size // 4).large for size in sizes]

    # What still fits into the budget is real.
    assert found == [False, False, True, False, True]
    ((code, text),) = notes
    assert code == AS_SHAPES
    assert "10.0 MiB" in text


@pytest.mark.parametrize(
    ("size", "options", "large"),
    [
        ((3 * MIB,), {}, True),
        ((1024, 3 * 1024), {}, True),
        (((1024, 3 * 1024),), {}, True),
        ((), {"size": (1024, 3 * 1024)}, True),
        ((2 * MIB,), {}, False),
        ((5 * MIB,), {"dtype": torch.float16}, False),
        ((6 * MIB,), {"dtype": torch.float16}, True),
        ((), {}, False),
    ],
    ids=str,
)
def test_sizes_however_they_are_given(weights, size, options, large):
    assert Weight(weights, *size, **options).large is large


def test_small_weights_are_real_and_not_counted(weights):
    assert not any(Weight(weights, 200_000).large for _ in range(100))
    assert not Weight(weights, 10 * MIB // 4).large


def test_other_tensors_of_the_host_are_real(weights):
    assert not weights((100 * MIB,), {})


def test_a_large_model_is_built_as_shapes_and_comes_to_the_device():
    # GIVEN a model of 1 GiB, of which the first 256 MiB are real
    with running() as session:
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(16)))
        real = [really(layer.weight) for layer in model]
        shown = {str(layer.weight.device) for layer in model}
        assert session.memory.allocated_bytes == 0
        model.cuda()
        model(torch.zeros(1, 4096).cuda()).sum().backward()

    assert real == ["cpu"] * 4 + ["meta"] * 12
    assert shown == {"cpu"}
    assert len(made(session, category=Category.PARAMETER)) == 16
    assert codes(session) == [AS_SHAPES]

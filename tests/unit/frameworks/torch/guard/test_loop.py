"""The objects of a training loop, as its guard handles them."""

import resource

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.guard_cases import Cnn, Transformer
from memfit.core.errors import BadModel
from memfit.core.guarding import GuardOptions, MemoryFailure, Where
from memfit.core.settings import Settings, Weighting
from memfit.frameworks.torch.guard.loop import TorchLoop, blocks, data_limit_bytes


def make(model=None, **options):
    model = model or Cnn(0.0)
    optimizer = torch.optim.Adam(model.parameters())
    return TorchLoop(model, optimizer, **options)


def test_stronger_moves_recompute_the_blocks():
    assert make().fallbacks().stronger == ({"checkpoint": ("layers.0", "layers.1", "layers.2"), "compile": False},)


def test_what_is_in_use_already_is_no_stronger_move():
    paths = ("layers.0", "layers.1", "layers.2")

    assert make(settings=Settings(checkpoint=paths)).fallbacks().stronger == ()
    assert make(nn.Linear(2, 2)).fallbacks().stronger == ()


def test_batch_norm_lets_samples_see_each_other():
    assert not make().fallbacks().whole_first
    assert make(nn.Sequential(nn.BatchNorm1d(3))).fallbacks().whole_first
    assert not make(nn.Sequential(nn.BatchNorm1d(3)).eval()).fallbacks().whole_first


def test_the_weighting_is_found_by_trying():
    loop = make(nn.Linear(3, 2))

    found, _ = loop.find_weighting(lambda model, batch: model(batch).square().sum(), torch.randn(6, 3))

    assert found == Weighting("sum")


def test_a_probe_that_finds_no_memory_assumes_samples():
    def loss(model, batch):
        raise MemoryError

    loop = make(nn.Linear(3, 2))
    weighting, reason = loop.find_weighting(loss, torch.randn(6, 3))

    assert weighting == Weighting() or weighting is None
    assert reason


def test_choosing_samples_for_a_probe_may_find_no_memory_either():
    class NoMemoryToCompare(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator is torch.ops.aten.ne.Tensor:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
            return operator(*args, **(kwargs or {}))

    loop = make(nn.Linear(3, 2))
    batch = (torch.randn(6, 3), torch.tensor([0, 0, 0, 1, 0, 1]))
    with NoMemoryToCompare():
        found = loop.find_weighting(lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), batch)

    assert found == (Weighting(), "there is no memory to try it out")


def test_the_explanation_has_figures_and_what_to_do():
    loop = make(Transformer(0.0))
    text = loop.explain(
        MemoryFailure(Where.HOST, "torch", 3 * 2**20),
        Settings(8, micro_batch_size=1, checkpoint=("a", "b")),
        "its samples differ",
    )

    assert "memory ran out on the host for 3.00 MiB, and nothing is left to try after micro-batches of 1" in text
    assert "with 2 modules recomputed" in text
    assert "The batch was not split: its samples differ" in text
    assert "memfit.plan" in text


def test_state_of_other_objects_goes_along(tmp_path):
    class Counter:
        number = 3

        def state_dict(self):
            return {"number": self.number}

        def load_state_dict(self, state):
            self.number = state["number"]

    counter = Counter()
    make(options=GuardOptions(state={"counter": counter})).write_state(tmp_path, {"update": 7})
    other = Counter()
    other.number = 0

    progress = make(options=GuardOptions(state={"counter": other})).read_state(tmp_path, lambda progress: None)

    assert (progress["update"], other.number) == (7, 3)


def test_a_model_must_be_a_module():
    with pytest.raises(BadModel, match="Module, but str was given"):
        TorchLoop("model", None)


# How much memory a step has, and what a finding depends on.


@pytest.mark.parametrize(
    ("batch", "samples", "elements"),
    [
        (torch.zeros(4, 3), 4, 3.0),
        ((torch.zeros(4, 3), torch.zeros(4)), 4, 4.0),
        ({"a": torch.zeros(2, 5), "b": torch.zeros(())}, 2, 5.5),
        ((torch.zeros(4, 3), torch.zeros(5)), None, 17.0),
        ([], None, 1.0),
    ],
)
def test_size_of_a_batch(batch, samples, elements):
    size = make().size_of(batch)

    assert (size.num_samples, size.elements_per_sample) == (samples, elements)


def test_what_is_held_counts_shared_storage_once():
    model = nn.Linear(10, 10, bias=False)
    model.other = model.weight
    loop = make(model)
    assert loop.held_bytes == 400

    model(torch.zeros(1, 10)).sum().backward()
    loop.optimizer.step()

    # Weight, gradient, two moments, and a count of steps.
    assert loop.held_bytes == 1604


def test_the_room_is_what_the_limit_leaves_and_what_is_held():
    loop = make(nn.Linear(1000, 1000, bias=False))
    wide, narrow = (loop.room_bytes(size, None) for size in (2**45, 2**44))

    assert wide - narrow == pytest.approx(2**44, abs=2**28)
    assert loop.room_bytes(1, None) == 0


def test_limits_of_this_process_count():
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    assert data_limit_bytes() is None
    resource.setrlimit(resource.RLIMIT_DATA, (2**46, hard))
    try:
        assert data_limit_bytes() == 2**46
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def test_a_finding_depends_on_model_optimizer_shapes_and_memory():
    def identity(width=4, kind=torch.optim.SGD, shape=(8, 4), host_bytes=100):
        model = nn.Linear(4, width)
        return TorchLoop(model, kind(model.parameters())).identity(torch.zeros(shape), host_bytes)

    assert identity() == identity(shape=(2, 4))
    for other in (identity(5), identity(kind=torch.optim.Adam), identity(shape=(8, 5)), identity(host_bytes=200)):
        assert other != identity()


# The repeated blocks of models.


class Staged(nn.Module):
    """Stages of blocks, as in a ResNet."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.stage1 = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()) for _ in range(2)))
        self.stage2 = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()) for _ in range(3)))
        self.head = nn.Linear(4, 2)


def test_layers_of_a_transformer():
    assert blocks(Transformer(0.1)) == ("encoder.layers.0", "encoder.layers.1")


def test_blocks_of_a_convolutional_network():
    assert blocks(Cnn(0.1)) == ("layers.0", "layers.1", "layers.2")
    assert blocks(Staged()) == ("stage1.0", "stage1.1", "stage2.0", "stage2.1", "stage2.2")


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))])
def test_models_without_blocks_have_none(model):
    assert blocks(model) == ()


def test_parts_that_are_not_trained_are_left_out():
    model = Staged()
    model.stage1.requires_grad_(False)

    assert blocks(model) == ("stage2.0", "stage2.1", "stage2.2")


def test_none_is_inside_of_another():
    for model in (Transformer(0.1), Cnn(0.1), Staged(), nn.Transformer(16, 2, 2, 2, 32, batch_first=True)):
        paths = blocks(model)
        assert not [(a, b) for a in paths for b in paths if a != b and b.startswith(f"{a}.")]

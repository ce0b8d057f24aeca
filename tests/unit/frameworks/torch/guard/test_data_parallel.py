import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memfit.frameworks.torch.guard import data_parallel
from memfit.frameworks.torch.guard.data_parallel import DataParallel
from memfit.frameworks.torch.guard.rank_exchange import num_begun
from memfit.frameworks.torch.guard.ranks import ranks_of

pytestmark = pytest.mark.usefixtures("one_process")


def make(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return DistributedDataParallel(model, **options)


def one_pass(model):
    model(torch.ones(2, 3) * torch.tensor([[1.0], [2.0]])).sum().backward()


def test_a_wrapped_model_is_recognised():
    ranks = ranks_of(make())

    assert isinstance(ranks, DataParallel)
    assert (ranks.num_ranks, ranks.is_first, ranks.communicates) == (1, True, False)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"broadcast_buffers": False},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated")
@pytest.mark.parametrize("used_before", [False, True], ids=["fresh", "used"])
def test_no_pass_communicates(options, used_before):
    # GIVEN a model of any kind, also one that has run without the guard before
    model = make(**options)
    if used_before:
        one_pass(model)
    ranks = DataParallel(model)

    for _ in range(3):
        # WHEN a window begins and its passes run
        ranks.begin()
        model.zero_grad(set_to_none=True)
        before = num_begun(model.process_group)
        ranks.run(2, lambda _: one_pass(model), lambda: None)

        # THEN no collective operation has been part of them
        assert num_begun(model.process_group) == before
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_passes_of_the_plain_model_would_communicate():
    model = make()
    before = num_begun(model.process_group)

    one_pass(model)

    assert num_begun(model.process_group) > before


def test_buffers_are_broadcast_when_a_window_begins():
    model = make()
    ranks = DataParallel(model)
    before = num_begun(model.process_group)

    ranks.begin()

    assert num_begun(model.process_group) > before


def test_a_model_in_join_is_refused():
    model = make()
    with pytest.raises(ValueError, match="join"), model.join():
        DataParallel(model).begin()


@pytest.mark.parametrize("bucket_bytes", [64, 4 << 20], ids=["many buckets", "one bucket"])
def test_gradients_are_summed(monkeypatch, bucket_bytes):
    # GIVEN operations that do what a second process with the same gradients would make of them
    monkeypatch.setattr(data_parallel, "BUCKET_BYTES", bucket_bytes)
    model = make()
    model.module[0].weight.requires_grad_(False)
    ranks = DataParallel(model)
    ranks.run(1, lambda _: one_pass(model), lambda: None)
    expected = [None if p.grad is None else 2 * p.grad for p in model.parameters()]
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group=None: tensor.mul_(2))

    ranks.reduce_gradients()

    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert gradient is None if parameter.grad is None else torch.equal(parameter.grad, gradient)


def test_gradients_in_another_memory_format_are_summed_where_they_are(monkeypatch):
    monkeypatch.setattr(data_parallel, "BUCKET_BYTES", 64)
    model = DistributedDataParallel(nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last))
    ranks = DataParallel(model)
    gradient = torch.arange(216.0).view(8, 3, 3, 3).to(memory_format=torch.channels_last)
    model.module.weight.grad = gradient.clone(memory_format=torch.preserve_format)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group=None: tensor.mul_(2))

    ranks.reduce_gradients()

    assert torch.equal(model.module.weight.grad, 2 * gradient)
    assert model.module.weight.grad.stride() == gradient.stride()


def test_parameters_without_a_gradient_anywhere_stay_without():
    model = make()
    ranks = DataParallel(model)

    ranks.reduce_gradients()

    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", [1, 2], ids=["dense", "sparse"])
def test_a_gradient_that_only_others_have_is_zero_here(monkeypatch, kind):
    model = DistributedDataParallel(nn.Embedding(5, 2, sparse=True))
    ranks = DataParallel(model)
    exchange = ranks.agree
    monkeypatch.setattr(ranks, "agree", lambda n: [0, -kind] if len(n) == 2 else exchange(n))

    ranks.reduce_gradients()

    assert model.module.weight.grad.is_sparse is (kind == 2)
    assert not model.module.weight.grad.to_dense().any()


def test_sparse_gradients_are_gathered():
    model = DistributedDataParallel(nn.Embedding(5, 2, sparse=True))
    ranks = DataParallel(model)
    ranks.run(1, lambda _: model(torch.tensor([1, 3, 3])).sum().backward(), lambda: None)

    ranks.reduce_gradients()

    gradient = model.module.weight.grad
    assert gradient.is_sparse
    assert gradient.to_dense().sum(dim=1).tolist() == [0, 2, 0, 4, 0]


def test_a_dense_gradient_becomes_sparse_where_others_have_it_so(monkeypatch):
    model = DistributedDataParallel(nn.Embedding(5, 2, sparse=True))
    ranks = DataParallel(model)
    model.module.weight.grad = torch.ones(5, 2)
    exchange = ranks.agree
    monkeypatch.setattr(ranks, "agree", lambda n: [1, -2] if len(n) == 2 else exchange(n))

    ranks.reduce_gradients()

    assert model.module.weight.grad.is_sparse
    assert torch.equal(model.module.weight.grad.to_dense(), torch.ones(5, 2))


def test_every_process_clips_for_itself():
    model = make()
    ranks = DataParallel(model)
    ranks.run(1, lambda _: one_pass(model), lambda: None)

    ranks.clip_norm(list(model.parameters()), 0.1)

    assert torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item() == pytest.approx(0.1, rel=1e-3)

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from memfit.core.patching import replaced
from memfit.core.timeline import Category, Phase
from memfit.frameworks.torch.simulation.distributed import distributed_replacements, environment
from tests.unit.frameworks.torch.sessions import codes, made, phases, running, timeline

WIDTH = 256
LAYER = (WIDTH * WIDTH + WIDTH) * 4


@pytest.fixture(autouse=True)
def no_group(monkeypatch):
    """Each test begins and ends without a process group, and outside of any launcher."""
    for name in environment(2):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def ranks():
    """A session on two devices, seen from the first of two processes."""
    with running(count=2) as session:
        dist.init_process_group("nccl", rank=0, world_size=2)
        torch.cuda.set_device(0)
        yield session


def layers(count=3):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def train(model, optimizer, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH).cuda()).sum().backward()
        optimizer.step()


def test_what_a_launcher_would_say():
    assert environment(1) == {}
    told = environment(4)
    assert (told["RANK"], told["LOCAL_RANK"], told["WORLD_SIZE"], told["LOCAL_WORLD_SIZE"]) == ("0", "0", "4", "4")
    assert {"MASTER_ADDR", "MASTER_PORT"} <= told.keys()


@pytest.mark.parametrize(
    "given",
    [
        {"backend": "nccl", "rank": 0, "world_size": 4},
        {"backend": "gloo", "init_method": "tcp://10.1.1.20:23456", "rank": 0, "world_size": 4},
        {"backend": "cpu:gloo,cuda:nccl", "init_method": "env://"},
        {"timeout": timedelta(minutes=1), "device_id": torch.device("cuda", 0)},
        {},
    ],
    ids=str,
)
def test_a_group_is_there_at_once_and_talks_to_nobody(given, monkeypatch):
    for name, value in environment(4).items():
        monkeypatch.setenv(name, value)
    with running(count=4) as session:
        dist.init_process_group(**given)

        assert (dist.get_rank(), dist.get_world_size()) == (0, 4)
        dist.barrier()
    assert codes(session) == ["one-rank"]


def test_a_group_by_position_as_old_scripts_write_it():
    with running(count=2):
        dist.init_process_group("nccl", "env://", timedelta(minutes=1), 2, 1)

        assert (dist.get_rank(), dist.get_world_size()) == (1, 2)


def test_without_a_launcher_the_group_is_as_large_as_there_are_devices():
    with running(count=2):
        dist.init_process_group("nccl")

        assert (dist.get_rank(), dist.get_world_size()) == (0, 2)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # old names, which scripts use
def test_collectives_keep_the_ranks_own_tensors(ranks):
    tensor = torch.ones(4, device="cuda")
    dist.all_reduce(tensor)
    dist.broadcast(tensor, src=0)
    gathered = [torch.empty(4, device="cuda") for _ in range(2)]
    dist.all_gather(gathered, tensor)
    whole = torch.empty(8, device="cuda")
    dist.all_gather_into_tensor(whole, tensor)
    part = torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(part, tensor)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()

    assert [t.is_cuda for t in (tensor, *gathered, whole, part)] == [True] * 5
    # They allocate nothing of their own.
    assert ranks.memory.allocated_bytes == 5 * 512


def test_collectives_of_host_tensors_too(ranks):
    tensor = torch.ones(4)
    dist.all_reduce(tensor)

    assert tensor.tolist() == [1, 1, 1, 1]


def test_objects_of_other_ranks_are_copies_of_its_own(ranks):
    found = [None, None]
    dist.all_gather_object(found, {"loss": [1]})
    assert found == [{"loss": [1]}, {"loss": [1]}]
    dist.gather_object("a", found)
    assert found == ["a", "a"]
    dist.gather_object("b")
    listed = ["x", "y"]
    dist.broadcast_object_list(listed, src=0)
    assert listed == ["x", "y"]
    taken = [None]
    dist.scatter_object_list(taken, ["first", "second"], src=0)
    assert taken == ["first"]


def test_groups_of_any_backend(ranks):
    group = dist.new_group([0, 1], backend="gloo")
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=group)
    dist.barrier(group=group)

    assert dist.get_world_size(group) == 2


def test_a_split_of_the_work_among_ranks_is_the_samplers_own(ranks):
    sampler = torch.utils.data.DistributedSampler(range(10), shuffle=False)

    assert list(sampler) == [0, 2, 4, 6, 8]


def test_data_parallel_has_its_buckets(ranks):
    # GIVEN a model of three layers
    model = DistributedDataParallel(layers().cuda(), device_ids=[0])
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))

    # THEN parameters are there once, gradients twice: their own, and buckets of the same size to send them in
    live = timeline(ranks).breakdown(timeline(ranks).num_ticks - 1, lambda block: block.category)
    assert live["parameter"] == 3 * LAYER
    assert live["gradient"] == 2 * 3 * LAYER
    assert [phase for phase, _ in phases(ranks)][:3] == ["forward", "backward", "optimizer"]


def test_gradients_that_are_views_of_the_buckets_take_nothing_more(ranks):
    model = DistributedDataParallel(layers().cuda(), gradient_as_bucket_view=True)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))

    live = timeline(ranks).breakdown(timeline(ranks).num_ticks - 1, lambda block: block.category)
    assert sum(live.values()) - live["workspace"] <= 2 * 3 * LAYER + 3 * 4 * WIDTH * 4


def test_data_parallel_with_accumulation_and_a_hook_of_the_users(ranks):
    model = DistributedDataParallel(layers(1).cuda())
    model.register_comm_hook(None, lambda state, bucket: None)
    with model.no_sync():
        model(torch.randn(4, WIDTH).cuda()).sum().backward()
    model(torch.randn(4, WIDTH).cuda()).sum().backward()

    assert all(parameter.grad is not None for parameter in model.parameters())


def sharded(count=4):
    model = layers(count).cuda()
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def test_sharded_parameters_are_a_part_on_each_rank(ranks):
    model = sharded()

    # Each rank keeps half of each parameter.
    live = sum(block.size_bytes for block in timeline(ranks).live_at(timeline(ranks).num_ticks - 1))
    assert live == pytest.approx(4 * LAYER / 2, rel=0.05)
    assert sum(p.to_local().numel() * 4 for p in model.parameters()) == 4 * LAYER / 2


def test_a_sharded_step(ranks):
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)

    assert ranks.counter.num_steps == 2
    state = made(ranks, category=Category.OPTIMIZER_STATE)
    assert sum(block.size_bytes for block in state) == 2 * 4 * LAYER / 2
    # The unsharded layers are let go again: at the end there is no more than parts.
    ends = timeline(ranks).breakdown(timeline(ranks).num_ticks - 1, lambda block: block.category)
    assert sum(ends.values()) - ends["workspace"] == pytest.approx(4 * 4 * LAYER / 2, rel=0.1)
    # In the middle of the forward pass at least one layer is whole.
    peak = max(
        sum(b.size_bytes for b in timeline(ranks).live_at(block.start) if b.category is not Category.WORKSPACE)
        for block in made(ranks, phase=Phase.FORWARD)
    )
    assert peak > sum(ends.values()) - ends["workspace"]


@pytest.mark.parametrize("name", ["spawn", "start_processes"])
def test_a_process_that_would_be_spawned_is_run_in_place(name):
    seen = []
    with running(count=2) as session:
        start = getattr(torch.multiprocessing, name)
        ended = start(lambda rank, word: seen.append((rank, word)), args=("hello",), nprocs=2)
        waiting = start(lambda rank: seen.append(rank), nprocs=2, join=False)
        # As scripts do that wait for the processes themselves.
        joined = waiting.join(timeout=1), list(waiting.processes)

    assert seen == [(0, "hello"), 0]
    assert (ended, joined) == (None, (True, []))
    assert set(codes(session)) == {"processes-not-spawned"}


def test_an_error_of_the_process_that_was_run_in_place_is_the_programs_own():
    with running(count=2), pytest.raises(ZeroDivisionError):
        torch.multiprocessing.spawn(lambda rank: 1 // rank, nprocs=2)


def test_whoever_gathers_gradients_says_so():
    # GIVEN a model whose gradients are gathered in buckets for the other ranks
    buckets = []
    with replaced(distributed_replacements(2, lambda code, text: None, buckets.append)):
        dist.init_process_group("nccl", rank=0, world_size=2)
        model = DistributedDataParallel(layers(1))
        model(torch.randn(4, WIDTH)).sum().backward()

    # THEN the buckets are told of, and the gradients are the rank's own
    assert [bucket.numel() * 4 for bucket in buckets] == [LAYER]
    assert torch.equal(model.module[0].bias.grad, torch.full((WIDTH,), 4.0))


def test_asking_for_the_list_changes_nothing():
    before = dict(vars(dist))
    listed = distributed_replacements(2, lambda code, text: None)

    assert dict(vars(dist)) == before
    assert len({(id(owner), name) for owner, name, _ in listed}) == len(listed)
    with replaced(listed):
        assert dist.is_nccl_available()
    assert dict(vars(dist)) == before


def test_the_environment_is_the_users_own():
    # What a launcher would set is for the process of a script; a session in this one leaves it alone.
    with running(count=2):
        assert "WORLD_SIZE" not in os.environ


def test_a_mesh_of_devices_makes_its_own_group():
    with running(count=2):
        mesh = init_device_mesh("cuda", (2,))

        assert (mesh.size(), dist.get_rank(), dist.get_world_size()) == (2, 0, 2)


def test_batch_norm_over_the_devices(ranks):
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))).cuda()
    model = DistributedDataParallel(model)
    out = model(torch.randn(2, 3, 8, 8, device="cuda"))
    out.sum().backward()

    assert out.shape == (2, 8, 6, 6)
    assert all(parameter.grad is not None for parameter in model.parameters())
    # Which of the ranks had data at all is not known.
    assert set(codes(ranks)) <= {"one-rank", "data-dependent-shape"}

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

from memfit.core.errors import StepFailed
from memfit.core.timeline import Category, Phase
from memfit.frameworks.torch.kernels import assumed_values
from memfit.frameworks.torch.simulation.dispatch import _collective
from tests.unit.frameworks.torch.builders import (
    HOST,
    forward_blocks,
    kept_bytes,
    made_in,
    notes,
    observe,
    parameter_bytes,
    run,
    sizes,
    total,
)
from tests.unit.frameworks.torch.sessions import codes, made, running

DATA = torch.empty(8, 10)
SIZE = 8 * 10 * 4


def made_by(work, *inputs, device=None):
    """(size, operator) of what `work` allocates."""
    options = {} if device is None else {"device": device}
    _, traced = observe(work, *(inputs or (DATA,)), **options)
    return [(b.size_bytes, b.op.removeprefix("aten.")) for b in forward_blocks(traced)]


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.view(80).shape,
        lambda x: x.t()[1:3, ::2].shape,
        lambda x: x.reshape(4, 20).shape,
        lambda x: [part.shape for part in x.split(2)],
        lambda x: x.expand(3, 8, 10).shape,
        lambda x: x.unsqueeze(0).squeeze(0).shape,
        lambda x: x.detach().contiguous().shape,
        lambda x: x.to(x.dtype).shape,
        lambda x: x.float().shape,
    ],
)
def test_views_allocate_nothing(work):
    assert made_by(work) == []


def test_a_view_keeps_the_whole_storage_alive():
    # GIVEN a function that holds a single row of a large tensor
    class Row(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(10, 10, bias=False)

        def forward(self, data):
            return self.layer(data).sin()[0].exp()

    # WHEN the backward pass needs the sine's input and the row's exponential
    traced = run(Row(), DATA, loss=lambda m, b: m(b).sum())

    # THEN the input is kept whole
    assert kept_bytes(traced) == SIZE + 10 * 4 + 4


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.relu_().shape,
        lambda x: x.add_(1).mul_(x).shape,
        lambda x: x.copy_(x).shape,
        lambda x: x.fill_(1).shape,
        lambda x: x.clamp_(0, 1).shape,
        lambda x: x.uniform_().shape,
        lambda x: F.relu(x, inplace=True).shape,
        lambda x: torch.add(x, x, out=x).shape,
        lambda x: x.t_().shape,
        lambda x: x.__setitem__(0, 1.0),
    ],
)
def test_writing_in_place_allocates_no_tensor(work):
    # A number to be written may pass through a tensor of one element.
    assert [size for size, _ in made_by(work) if size > 8] == []


def test_an_activation_in_place_saves_memory():
    plain = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Sigmoid(), nn.ReLU(), nn.Linear(10, 1))
    in_place = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Sigmoid(), nn.ReLU(inplace=True), nn.Linear(10, 1))

    with pytest.raises(StepFailed, match="modified by an inplace operation"):
        run(in_place, DATA)
    in_place[1] = nn.Identity()
    plain[1] = nn.Identity()
    before = [total(forward_blocks(run(m, DATA))) for m in (plain, in_place)]
    assert before[0] - before[1] == SIZE


def test_out_variants_write_into_what_they_are_given():
    assert made_by(lambda x: torch.mul(x, x, out=torch.empty_like(x)).shape) == [(SIZE, "empty_like")]


def test_out_variants_grow_an_empty_tensor():
    assert made_by(lambda x: torch.mul(x, x, out=x.new_empty(0)).shape) == [(SIZE, "mul")]


def test_a_tensor_that_grows_is_a_new_block():
    def work(x):
        grown = x.clone()
        grown.resize_(100)
        return grown.shape

    _, traced = observe(work, DATA)
    first, second = forward_blocks(traced)
    assert (first.size_bytes, second.size_bytes) == (SIZE, 400)
    # PyTorch copies into the new storage before it lets go of the old one; the trace sees the change at once.
    assert first.end == second.start - 1


@pytest.mark.parametrize(
    ("work", "size"),
    [
        (lambda x: torch.zeros(1000, device="cuda"), 4000),
        (lambda x: torch.tensor([1.0] * 1000, device="cuda"), 4000),
        (lambda x: torch.tensor([[1, 2], [3, 4]], device=x.device), 32),
        (lambda x: torch.as_tensor([1.0] * 1000, device="cuda"), 4000),
        (lambda x: torch.arange(1000, device=x.device), 8000),
        (lambda x: torch.zeros(1000).to(x.device), 4000),
        (lambda x: torch.zeros(1000).to("cuda:0", torch.float16), 2000),
        (lambda x: torch.zeros(1000).cuda(), 4000),
        (lambda x: x.new_zeros(1000), 4000),
        (lambda x: x.new_tensor([1.0] * 1000), 4000),
        (lambda x: torch.zeros_like(x), SIZE),
        (lambda x: torch.randn(1000, device=x.device), 4000),
    ],
)
def test_tensors_made_for_the_device_are_counted(work, size):
    assert [made for made, _ in made_by(work)] == [size]


@pytest.mark.parametrize(
    "work", [lambda x: torch.zeros(1000), lambda x: torch.tensor([1.0] * 1000), lambda x: torch.arange(1000) + 1]
)
def test_tensors_on_the_host_are_not_on_the_device(work):
    assert made_by(work) == []


def test_on_the_host_all_tensors_are():
    assert made_by(lambda x: torch.zeros(1000), device=HOST) == [(4000, "zeros")]
    assert made_by(lambda x: torch.tensor([1.0] * 1000), device=HOST) == [(4000, "_to_copy")]


def test_tensors_of_two_devices_are_refused_as_cuda_refuses_them():
    with pytest.raises(StepFailed, match=r"same device.*cuda:0 and cpu"):
        observe(lambda x: x + torch.zeros(10), DATA)


def test_single_numbers_may_come_from_the_host():
    assert observe(lambda x: (x * torch.tensor(2.0)).shape, DATA)[0] == (8, 10)


def test_indices_may_come_from_the_host():
    assert observe(lambda x: x[torch.tensor([0, 2])].shape, DATA)[0] == (2, 10)

    def put(x):
        x[torch.tensor([0, 2])] = x[:2]
        return x.shape

    assert observe(put, DATA)[0] == (8, 10)


def test_on_the_host_real_tensors_belong_to_the_device():
    real = torch.zeros(10)

    assert observe(lambda x: (x + real).shape, DATA, device=HOST)[0] == (8, 10)


def test_sparse_gradients_of_an_embedding():
    # GIVEN a large table of which few rows are used
    model = nn.Embedding(1000, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(list(model.parameters()))

    traced = run(model, torch.zeros(6, dtype=torch.int64), optimizer=optimizer)

    # THEN its gradient is six rows with six indices
    gradients = [b.size_bytes for b in made_in(traced, Phase.BACKWARD) if b.category is Category.GRADIENT]
    assert sorted(gradients) == [6 * 8, 6 * 4 * 4]
    state = total(traced.timeline.live_at(traced.timeline.num_ticks - 1), Category.OPTIMIZER_STATE)
    assert state == 2 * parameter_bytes(model)


def test_sparse_tensors_of_the_batch_pass():
    batch = torch.eye(8).to_sparse()

    def loss(model, batch):
        return torch.sparse.mm(batch, model.weight.t()).sum()

    traced = run(nn.Linear(8, 4, bias=False), batch, loss=loss)

    assert made_in(traced, Phase.BACKWARD)


def test_channels_last_in_channels_last_out():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    layouts = []

    def loss(model, batch):
        for layer in model:
            batch = layer(batch)
            layouts.append(batch.is_contiguous(memory_format=torch.channels_last))
        return batch.sum()

    for layout, expected in ((torch.channels_last, True), (torch.contiguous_format, False)):
        layouts.clear()
        run(model.to(memory_format=layout), torch.empty(2, 3, 8, 8).to(memory_format=layout), loss=loss)
        assert set(layouts) == {expected}


def test_an_operator_that_is_made_of_others_is_taken_apart():
    # GIVEN an operator that has no kernel for shapes but is written in terms of others
    _, traced = observe(lambda x: F.pairwise_distance(x, x).shape, DATA)

    assert traced.notes == ()


def test_the_same_operator_on_other_shapes_is_not_confused():
    def work(x):
        return [x.narrow(0, 0, n).sum(1).shape[0] for n in (1, 2, 8, 2)]

    assert observe(work, DATA)[0] == [1, 2, 8, 2]


def test_complex_numbers_and_transforms_run():
    made = made_by(lambda x: torch.fft.rfft(x).abs().shape)

    assert made[0] == (8 * 6 * 8, "_fft_r2c")


def test_operators_with_several_outputs_are_counted_whole():
    assert made_by(lambda x: x.topk(2)[0].shape) == [(8 * 2 * 4, "topk"), (8 * 2 * 8, "topk")]


def test_nothing_is_noted_for_a_plain_step():
    assert notes(run(nn.Linear(10, 10), DATA, optimizer=torch.optim.AdamW)) == []


def test_values_of_parameters_are_untouched_by_operations_in_place():
    model = nn.Linear(10, 10)
    before = model.weight.detach().clone()

    def loss(model, batch):
        with torch.no_grad():
            model.weight.zero_()
        return model(batch).sum()

    run(model, DATA, loss=loss)

    assert torch.equal(model.weight, before)


def test_sizes_helper_sees_operators():
    _, traced = observe(lambda x: (x + 1).shape, DATA)

    assert sizes(forward_blocks(traced), "add") == [SIZE]


def operators(session):
    return [block.op.removeprefix("aten.") for block in made(session)]


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda x: F.linear(x, x), ["mm"]),
        (lambda x: torch.matmul(x, x.t()), ["mm"]),
        (lambda x: F.layer_norm(x, (10,)), ["native_layer_norm"] * 3),
        (lambda x: torch.einsum("ij,kj->ik", x, x), ["bmm"]),
        (lambda x: F.cross_entropy(x, x), ["_log_softmax", "mul", "sum", "neg", "div"]),
        (lambda x: torch.square(x), ["pow"]),
        (lambda x: x.flatten(), []),
        (lambda x: F.conv1d(x[None], x.view(10, 8, 1)), ["convolution"]),
    ],
    ids=["linear", "matmul", "layer_norm", "einsum", "cross_entropy", "square", "flatten", "conv1d"],
)
def test_in_inference_mode_operators_are_made_of_the_same_parts(work, expected):
    # GIVEN operators that autograd takes apart, which inference mode leaves out
    found = []
    for context in (torch.no_grad, torch.inference_mode):
        with running() as session, context():
            x = torch.zeros(8, 10, device="cuda")
            assert work(x).is_cuda
        # cuBLAS takes its workspace at its first product.
        found.append([name for name in operators(session)[1:] if "workspace" not in name])

    assert found[0] == found[1] == expected


def test_a_whole_model_in_inference_mode():
    peaks = []
    for context in (torch.no_grad, torch.inference_mode):
        with running() as session:
            model = nn.Sequential(
                nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10), nn.Softmax(-1)
            )
            model.cuda().eval()
            with context():
                assert model(torch.zeros(2, 3, 8, 8).cuda()).shape == (2, 10)
        peaks.append(session.memory.stats()["allocated_bytes.all.peak"])

    assert peaks[0] == peaks[1]


def test_tensors_made_of_others_come_back_with_their_parts():
    with running() as session:
        pair = TwoTensor(torch.zeros(4, device="cuda"), torch.ones(4, device="cuda"))
        out = pair * 2

        assert isinstance(out, TwoTensor)
        assert out.a.is_cuda
    assert operators(session) == ["zeros", "ones", "mul", "mul"]


@pytest.fixture
def mesh():
    """Two simulated devices, of which this process has the first."""
    with running(count=2) as session:
        dist.init_process_group("nccl", rank=0, world_size=2)
        try:
            yield init_device_mesh("cuda", (2,)), session
        finally:
            dist.destroy_process_group()


def test_distributed_tensors_take_the_memory_of_their_local_part(mesh):
    devices, session = mesh
    whole = torch.zeros(1000, 8, device="cuda")
    before = session.memory.allocated_bytes
    sharded = distribute_tensor(whole, devices, [Shard(0)])
    held = session.memory.allocated_bytes - before

    assert isinstance(sharded, DTensor)
    assert (sharded.shape, sharded.to_local().shape) == ((1000, 8), (500, 8))
    assert held == 500 * 8 * 4 + 384  # rounded up to a multiple of 512
    doubled = sharded * 2
    assert doubled.placements == (Shard(0),)
    assert session.memory.allocated_bytes == before + 2 * held
    assert doubled.redistribute(devices, [Replicate()]).to_local().shape == (1000, 8)


def test_products_of_distributed_tensors(mesh):
    devices, _ = mesh
    left = distribute_tensor(torch.zeros(8, 4, device="cuda"), devices, [Shard(0)])
    right = distribute_tensor(torch.zeros(4, 6, device="cuda"), devices, [Replicate()])

    out = left @ right
    assert (out.shape, out.to_local().shape, out.to_local().is_cuda) == ((8, 6), (4, 6), True)


def test_inquiries_with_fake_tensors_are_nobodys_memory():
    # As DTensor makes them, below the function mode.
    with running() as session, torch._C.DisableTorchFunction():
        with FakeTensorMode() as fake:
            asked = fake.from_tensor(torch.zeros(4, 4)) @ torch.zeros(4, 2)
            assert asked.shape == (4, 2)
        assert session.memory.allocated_bytes == 0

    assert made(session) == []


def test_a_device_that_is_named_below_the_function_mode():
    # GIVEN code of PyTorch's own, for which the function mode is off
    with running() as session, torch._C.DisableTorchFunction():
        made_there = torch.zeros(100, device="cuda")
        like = torch.empty_like(torch.zeros(2), device=torch.device("cuda", 0))

        assert made_there.is_meta
        assert like.is_meta
    assert [block.size_bytes for block in made(session)] == [400, 8]


def test_collectives_pass_and_allocate_nothing(mesh):
    _, session = mesh
    tensor = torch.ones(100, device="cuda")
    before = len(made(session))
    dist.all_reduce(tensor)
    dist.barrier()

    assert len(made(session)) == before


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # old names, which scripts use
def test_a_rank_still_knows_its_own_values_after_a_collective(mesh):
    _, session = mesh
    count = torch.tensor([3, 4], device="cuda")
    dist.all_reduce(count)
    dist.broadcast(count, src=0)
    dist.barrier()
    gathered = torch.zeros(4, dtype=torch.int64, device="cuda")
    dist.all_gather_into_tensor(gathered, count)
    listed = [torch.zeros(2, dtype=torch.int64, device="cuda") for _ in range(2)]
    dist.all_gather(listed, count)
    part = torch.zeros(1, dtype=torch.int64, device="cuda")
    dist.reduce_scatter_tensor(part, count.clone())

    assert count.tolist() == [3, 4]
    # What others would have sent is taken to be like its own.
    assert gathered.tolist() == [3, 4, 3, 4]
    assert [t.tolist() for t in listed] == [[3, 4], [3, 4]]
    assert codes(session) == ["one-rank"]
    # A sum of parts that others have is not known.
    part.item()
    assert codes(session) == ["one-rank", "stand-in-value"]


def test_collectives_of_releases_that_have_no_shapes_for_them():
    # GIVEN an operator that refuses shapes, and gives back what it was given with something to wait for
    seen = []

    def refuses(tensors, group, *, timeout):
        if any(tensor.is_meta for tensor in tensors):
            raise NotImplementedError
        seen.append(([tuple(tensor.shape) for tensor in tensors], group, timeout))
        return tensors, "work"

    tensors = [torch.empty(5, device="meta"), torch.empty(6, device="meta")]
    out, work = _collective(refuses, (tensors, "group"), {"timeout": 3})

    # THEN it is run on others, and the answer holds those that were given
    assert seen == [([(1,), (1,)], "group", 3)]
    assert (out is tensors, work) == (True, "work")


def test_collectives_that_give_only_something_to_wait_for():
    def refuses(tensor):
        if tensor.is_meta:
            raise NotImplementedError
        return "work"

    assert _collective(refuses, (torch.empty(5, device="meta"),), {}) == "work"
    assert _collective(lambda tensor: tensor, (out := torch.empty(5, device="meta"),), {}) is out


def test_a_number_that_is_read():
    with running() as session:
        known, unknown = torch.tensor(7, device="cuda"), torch.randn(3, device="cuda").sum()
        read = session.simulation.operators.read_number
        found = read(known), read(unknown)

    assert found == (7, 1.0)
    assert codes(session) == ["stand-in-value"]


def test_a_step_ends_the_waiting_for_another_answer(monkeypatch):
    monkeypatch.setattr(assumed_values, "_PATIENCE", 5)
    with running() as session:
        weight = nn.Parameter(torch.zeros(3, device="cuda"))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        found = []
        # GIVEN a program that reads three numbers a step at one line
        for number in range(12):
            found.append(torch.randn(3, device="cuda").sum().item())
            if number % 3 == 2:
                weight.sum().backward()
                optimizer.step()
        # THEN only one that reads without a step gets another answer
        waited = [torch.randn(3, device="cuda").sum().item() for _ in range(6)]

    assert found == [1.0] * 12
    assert waited == [1.0, 1.0, 1.0, 1.0, 0.0, 1.0]
    assert session.counter.num_steps == 4


def test_an_operator_that_was_taken_apart_has_the_values_of_its_parts():
    with running() as session:
        left, right = torch.tensor([1.0, 2.0], device="cuda"), torch.tensor([3.0, 4.0], device="cuda")
        assert torch.inner(left, right).item() == 11
        assert torch.movedim(left.view(1, 2), 0, 1).tolist() == [[1.0], [2.0]]
    assert codes(session) == []


class Named(torch.Tensor):
    """A class of tensors without operators of its own, as image libraries have them."""


def test_classes_of_tensors_without_operators_of_their_own_are_tensors():
    with running() as session:
        image = torch.zeros(10, device="cuda").as_subclass(Named)
        doubled = image * 2

        assert isinstance(doubled, Named)
        assert doubled.is_cuda
    assert [block.size_bytes for block in made(session)] == [40, 40]


@pytest.mark.parametrize("copied", [lambda x: x.cpu(), lambda x: x.to("cpu"), lambda x: x.to("cpu", torch.int64)])
def test_known_values_are_copied_exactly(copied):
    with running() as session:
        lengths = torch.tensor([3, 1, 2]).cuda()
        host = copied(lengths + 1)
        lengths.zero_()

        assert host.tolist() == [4, 2, 3]
        # Not a view of what is known: it stays when the tensor changes, and may be changed itself.
        host.fill_(9)
        assert lengths.tolist() == [0, 0, 0]
    assert codes(session) == []


def test_known_values_give_exact_shapes():
    with running() as session:
        mask = torch.tensor([True, False, True]).cuda()
        data = torch.randn(3, 4, device="cuda")

        assert data[mask].shape == (2, 4)
        assert mask.nonzero().shape == (2, 1)
        assert torch.tensor([5, 5, 6], device="cuda").unique().tolist() == [5, 6]
    assert codes(session) == []


def test_gradients_that_are_added_are_no_longer_known():
    with running():
        weight = torch.zeros(3, device="cuda", requires_grad=True)
        for _ in range(2):
            (weight * torch.randn(3, device="cuda")).sum().backward()

        # Of the unknown: what stands in.
        assert weight.grad.sum().item() == 1.0


def test_operators_of_another_device_are_on_nobodys_account():
    with running(count=2) as session:
        x = torch.zeros(100, device="cuda:1")
        mask = (x > 0).nonzero()
        x.add_(1)

        assert mask.device == x.sum().device == torch.device("cuda", 1)
        assert (x.shape, x.topk(2)[0].device) == ((100,), x.device)
    assert made(session) == []


HALF_LEFT, HALF_RIGHT, SUM = torch.empty(4, 8).half(), torch.empty(8, 3).half(), torch.empty(4, 3)


@pytest.mark.parametrize(
    ("work", "sizes"),
    [
        (lambda a, b, acc: torch.mm(a, b, out_dtype=torch.float32), [48]),
        (lambda a, b, acc: torch.bmm(a[None], b[None], out_dtype=torch.float32), [48]),
        (lambda a, b, acc: torch.addmm(acc, a, b, out_dtype=torch.float32), [48]),
        (lambda a, b, acc: torch.addmm(acc[0], a, b, out_dtype=torch.float32), [48]),
        (lambda a, b, acc: torch.addmm(acc, a, b, out_dtype=torch.float32, out=acc), []),
        (lambda a, b, acc: torch.baddbmm(acc[None], a[None], b[None], out_dtype=torch.float32), [48]),
        (lambda a, b, acc: torch.baddbmm(acc[None], a[None], b[None], out_dtype=torch.float32, out=acc[None]), []),
    ],
)
def test_products_of_halves_are_summed_up_in_float32(work, sizes):
    def dtype(*given):
        return work(*given).dtype

    result, traced = observe(dtype, HALF_LEFT, HALF_RIGHT, SUM)
    assert result is torch.float32
    # No factor is cast: beside the library's workspace there is only the sum.
    assert [b.size_bytes for b in forward_blocks(traced) if b.category is not Category.WORKSPACE] == sizes


@pytest.mark.parametrize(
    "work",
    [
        lambda a, b, acc: torch.addmm(acc, a, b),
        lambda a, b, acc: torch.addmm(acc.double(), a, b, out_dtype=torch.float32),
        lambda a, b, acc: torch.mm(a, b.bfloat16(), out_dtype=torch.float32),
        lambda a, b, acc: torch.mm(a.float(), b.float(), out_dtype=torch.float16),
        lambda a, b, acc: torch.baddbmm(acc, a[None], b[None], out_dtype=torch.float32),
        lambda a, b, acc: torch.mm(a, b, out_dtype=torch.float32, out=acc.half()),
        lambda a, b, acc: torch.mv(a, b[:, 0].bfloat16()),
    ],
)
def test_products_that_kernels_refuse(work):
    with pytest.raises(StepFailed, match=r"dtype|same shape"):
        observe(work, HALF_LEFT, HALF_RIGHT, SUM)

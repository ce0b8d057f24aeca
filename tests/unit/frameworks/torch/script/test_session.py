"""Plain PyTorch code in a session: what it finds, what is recorded of it, and what happens when the device is full."""

import gc
import importlib
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import memfit
from memfit.core.timeline import Category, Phase
from memfit.core.units import GIB, MIB
from memfit.frameworks.torch.script.steps import EndOfRun
from memfit.frameworks.torch.simulation import live_recorder
from tests.unit.frameworks.torch.builders import line_of
from tests.unit.frameworks.torch.sessions import (
    T4,
    codes,
    made,
    make_session,
    phases,
    really,
    running,
    timeline,
    visiting,
)

STEP = ("forward", "backward", "optimizer")


def network(width=16):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))


def batch(rows=4):
    return torch.randn(rows, 8).cuda(), torch.zeros(rows, dtype=torch.int64).cuda()


def train(model, optimizer, steps=2, rows=4):
    for _ in range(steps):
        data, target = batch(rows)
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        optimizer.step()


def numbered(*steps):
    """The phases of whole steps with these numbers, and the beginning of the one after."""
    return [(phase, step) for step in steps for phase in STEP] + [("forward", steps[-1] + 1)]


def total(blocks):
    return sum(block.size_bytes for block in blocks)


# What the program finds


def test_the_device_is_there_while_it_lasts():
    assert not torch.cuda.is_available()
    with running(count=2):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 2
        assert torch.cuda.get_device_name(0) == "NVIDIA Tesla T4"
        assert torch.zeros(2).cuda().device == torch.device("cuda", 0)
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 0


def test_memory_is_that_of_the_program():
    with running(1 * GIB):
        before = torch.cuda.memory_allocated()
        kept = torch.zeros(1000, 1000, device="cuda")
        during = torch.cuda.memory_allocated()
        del kept

        assert (before, during, torch.cuda.memory_allocated()) == (0, 4_000_256, 0)
        assert torch.cuda.max_memory_allocated() == 4_000_256
        assert torch.cuda.memory_reserved() == 20 * MIB
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0


def test_a_device_that_is_not_the_first_has_memory_of_its_own():
    with running(1 * GIB, count=2) as session:
        kept = torch.zeros(1000, device="cuda:1") + 1
        assert kept.device == torch.device("cuda", 1)
        assert session.memory.allocated_bytes == 0


def test_one_session_at_a_time_but_one_after_another():
    for _ in range(2):
        with running() as session:
            train(network().cuda(), torch.optim.SGD(network().cuda().parameters(), lr=0.1), steps=1)
        assert session.memory.allocated_bytes


@pytest.mark.parametrize("make_optimizer", [torch.optim.AdamW, torch.optim.SGD], ids=lambda made: made.__name__)
def test_a_model_may_be_spread_over_devices(make_optimizer):
    # GIVEN a model whose second half is on the second device
    with running(count=2) as session:
        first, second = nn.Linear(100, 100).to("cuda:0"), nn.Linear(100, 100).to("cuda:1")
        parameters = [*first.parameters(), *second.parameters()]
        optimizer = make_optimizer(parameters, lr=0.1)

        # WHEN it is trained
        for _ in range(2):
            optimizer.zero_grad()
            hidden = first(torch.zeros(4, 100, device="cuda:0"))
            second(hidden.to("cuda:1")).sum().backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()

        # THEN gradients are where their parameters are, and the memory is that of the first half
        assert [p.grad.device.index for p in parameters] == [0, 0, 1, 1]
        assert sum(block.size_bytes for block in made(session, category=Category.PARAMETER)) == 40_400


# Phases and categories


def test_phases_of_a_plain_loop():
    with running() as session:
        model = network().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer, steps=3)

    assert phases(session) == numbered(1, 2, 3)
    assert session.counter.num_steps == 3


def test_categories_of_a_plain_loop():
    # GIVEN a model whose bytes can be counted by hand
    with running() as session:
        model = network().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer, steps=2)

    parameters = (8 * 16 + 16 + 16 * 2 + 2) * 4
    assert total(made(session, category=Category.PARAMETER)) == parameters
    assert {block.phase for block in made(session, category=Category.PARAMETER)} == {Phase.SETUP}
    for step, start in enumerate(mark.tick for mark in timeline(session).marks if mark.phase is Phase.OPTIMIZER):
        live = timeline(session).breakdown(start, lambda block: block.category)
        assert live["gradient"] == parameters
        # Of the first optimizer step it is the beginning: the first state of the first parameter.
        assert live["optimizer state"] == (2 * parameters if step else 8 * 16 * 4)
    assert total(made(session, category=Category.OPTIMIZER_STATE)) == 2 * parameters
    assert total(made(session, category=Category.BATCH)) == 2 * (4 * 8 * 4 + 4 * 8)
    activations = [block.op for block in made(session, category=Category.ACTIVATION)]
    assert activations.count("aten.relu") == activations.count("aten._log_softmax") == 2
    assert {block.phase for block in made(session, category=Category.ACTIVATION)} == {Phase.FORWARD}


def test_modules_of_a_plain_loop():
    with running() as session:
        model = network().cuda()
        train(model, torch.optim.AdamW(model.parameters()))

    for category in (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE):
        assert {block.module for block in made(session, category=category)} == {"0", "2"}
    assert {block.module for block in made(session, op="relu")} == {"1"}


def test_buffers_are_buffers():
    with running() as session:
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).cuda()
        model(torch.randn(4, 8).cuda())

    found = [(block.size_bytes, block.module) for block in made(session, category=Category.BUFFER)]
    assert found == [(16, "1"), (16, "1"), (8, "1")]


def test_modules_that_find_out_their_shapes_when_they_are_called():
    with running() as session:
        model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.Linear(16, 2)).cuda()
        model(batch()[0])
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))

    assert session.estimate("test", 0.0, died=False).num_parameters == sum(p.numel() for p in model.parameters())
    assert {block.module for block in made(session, category=Category.PARAMETER)} == {"0", "1", "2"}
    assert {block.module for block in made(session, category=Category.GRADIENT)} == {"0", "1", "2"}


def test_gradient_accumulation_is_one_step():
    with running() as session:
        model = network().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(3):
                data, target = batch()
                (F.cross_entropy(model(data), target) / 3).backward()
            optimizer.step()

    micro = ["forward", "backward"]
    expected = [(phase, step) for step in (1, 2) for phase in (*micro, *micro, *micro, "optimizer")]
    # After an optimizer step the forward pass of the next begins with its batch.
    assert phases(session) == [*expected, ("forward", 3)]
    # Gradients are added in place: one set for each step.
    parameters = sum(p.numel() * 4 for p in model.parameters())
    assert total(made(session, category=Category.GRADIENT)) == 2 * parameters


def test_two_optimizers_as_in_a_gan():
    with running() as session:
        generator, critic = nn.Linear(4, 8).cuda(), nn.Linear(8, 1).cuda()
        makes = torch.optim.Adam(generator.parameters())
        judges = torch.optim.Adam(critic.parameters())
        for _ in range(2):
            fake = generator(torch.randn(4, 4).cuda())
            judges.zero_grad()
            critic(fake.detach()).mean().backward()
            judges.step()
            makes.zero_grad()
            critic(fake).mean().backward()
            makes.step()

    assert session.counter.num_steps == 2
    assert [phase for phase, _ in phases(session)] == [*STEP * 4, "forward"]
    # A step is one of the busiest optimizer.
    assert [step for _, step in phases(session)] == [1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3]
    state = {block.module for block in made(session, category=Category.OPTIMIZER_STATE)}
    parameters = {block.module for block in made(session, category=Category.PARAMETER)}
    assert state == parameters == {"", "Linear"}


def test_an_update_by_hand():
    with running() as session:
        weight = torch.zeros(8, 2, device="cuda", requires_grad=True)
        for _ in range(3):
            (batch()[0] @ weight).sum().backward()
            with torch.no_grad():
                weight -= 0.1 * weight.grad
                weight.grad = None

    assert session.counter.num_steps == 3
    # Each backward pass belongs to the step that it is.
    assert phases(session) == [("backward", 1), ("backward", 2), ("backward", 3)]


def test_a_tensor_that_no_model_holds_is_a_parameter_of_its_optimizer():
    with running() as session:
        image = torch.zeros(100, device="cuda", requires_grad=True)
        optimizer = torch.optim.Adam([image])
        image.square().sum().backward()
        optimizer.step()

    assert [block.size_bytes for block in made(session, category=Category.PARAMETER)] == [400]
    assert [block.size_bytes for block in made(session, category=Category.OPTIMIZER_STATE)] == [400, 400]


def test_a_model_that_is_only_evaluated_has_its_forward_pass():
    with running() as session:
        model = network().cuda()
        with torch.no_grad():
            model(batch()[0])

    assert phases(session) == [("forward", 1)]
    assert made(session, category=Category.ACTIVATION) == []


def test_the_backward_pass_of_a_checkpointed_part_is_one_pass():
    with running() as session:
        first, second = nn.Linear(8, 8).cuda(), nn.Linear(8, 2).cuda()
        hidden = checkpoint(first, batch()[0].requires_grad_(), use_reentrant=True)
        second(hidden).sum().backward()

    assert phases(session) == [("forward", 1), ("backward", 1)]


def test_an_optimizer_that_calls_the_loss_itself_is_back_in_its_own_phase():
    with running() as session:
        model = network().cuda()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        data, target = batch()

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            return loss

        optimizer.step(closure)

    assert session.counter.num_steps == 1
    # Whatever LBFGS keeps of earlier gradients is allocated by the optimizer, between its calls of the closure.
    phases_of_state = {block.phase for block in made(session, category=Category.OPTIMIZER_STATE)}
    assert phases_of_state == {Phase.OPTIMIZER}


def test_the_run_ends_when_enough_steps_were_taken():
    settled = []
    with pytest.raises(EndOfRun), running(steps=2, settled=lambda: settled.append(1)) as session:
        model = network().cuda()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=100)

    assert session.counter.num_steps == len(settled) == 2


# Memory as estimated


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, data):
        normed = self.norm(data)
        data = data + self.attention(normed, normed, normed, need_weights=False)[0]
        return data + self.feed(data)


def transformer():
    return nn.Sequential(nn.Embedding(1000, 128), Block(128), Block(128), nn.Linear(128, 1000))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


JOBS = {
    "mlp": (lambda: network(2048), lambda: (torch.randn(512, 8), torch.zeros(512, dtype=torch.int64))),
    "cnn": (convolutions, lambda: (torch.randn(16, 3, 64, 64), torch.zeros(16, dtype=torch.int64))),
    "transformer": (transformer, lambda: (torch.zeros(8, 64, dtype=torch.int64),) * 2),
}


def loss_of(model, given):
    data, target = given
    return F.cross_entropy(model(data).flatten(0, -2), target.flatten())


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("precision", ["fp32", "amp-fp16"])
@pytest.mark.parametrize("name", JOBS)
def test_the_peak_is_that_of_the_estimate(name, precision, optimizer):
    # GIVEN the estimate of a step
    make_model, make_batch = JOBS[name]
    make_optimizer = getattr(torch.optim, optimizer)
    estimate = memfit.estimate(
        make_model(), loss_of, make_batch(), optimizer=make_optimizer, device="t4", precision=precision
    )

    # WHEN the same step is taken in a loop as people write it
    with running() as session:
        model = make_model().cuda()
        taking = make_optimizer(model.parameters(), lr=0.001)
        scaler = torch.amp.GradScaler("cuda", enabled=precision != "fp32")
        for _ in range(3):
            given = tuple(tensor.cuda() for tensor in make_batch())
            taking.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16, enabled=precision != "fp32"):
                loss = loss_of(model, given)
            scaler.scale(loss).backward()
            scaler.step(taking)
            scaler.update()
            del given

    # THEN its peak is the same
    seen = session.estimate(name, 0.0, died=False).replay
    assert seen.allocated_peak_bytes == pytest.approx(estimate.replay.allocated_peak_bytes, rel=0.01)


def test_what_is_told_of_a_run():
    with running() as session:
        model = network().cuda()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))

    told = session.estimate("train.py", 1.5, died=False)
    assert (told.subject, told.device, told.mode, told.batch_size, told.seconds) == (
        "train.py", T4, "dry run", None, 1.5,
    )  # fmt: skip
    assert told.num_parameters == sum(p.numel() for p in model.parameters())
    assert told.timeline.num_ticks == len(told.replay.allocated)
    assert told.peak_bytes == told.replay.reserved_peak_bytes + T4.context_bytes
    assert told.certain_bytes <= told.tight_bytes <= told.peak_bytes
    # Its host tensors were real, so that what the process held is measured.
    assert sum(told.host.parts.values()) > 50 * MIB


# A full device


def oom_of(capacity_bytes, work):
    """(the error, the session) of work that does not fit."""
    session = make_session(capacity_bytes)
    with session.running(), pytest.raises(torch.OutOfMemoryError) as caught:
        work()
    return caught, session


def ask_too_much():
    return torch.zeros(1000, 1000, 1000, device="cuda")


def test_the_error_is_pytorchs_own():
    caught, _ = oom_of(1 * GIB, ask_too_much)

    text = str(caught.value)
    assert text.startswith("CUDA out of memory. Tried to allocate 3.73 GiB. GPU 0 has a total capacity of 14.56 GiB")
    assert torch.OutOfMemoryError is torch.cuda.OutOfMemoryError
    assert isinstance(caught.value, RuntimeError)


def test_a_failure_has_all_that_is_known():
    caught, session = oom_of(1 * GIB, ask_too_much)

    (failure,) = session.failures
    assert failure.message == str(caught.value)
    assert failure.source.endswith(f"test_session.py:{line_of(ask_too_much)}")
    assert failure.code == 'return torch.zeros(1000, 1000, 1000, device="cuda")'
    assert (failure.op, failure.requested_bytes, failure.phase, failure.step) == (
        "aten.zeros", 4_000_000_000, Phase.SETUP, 0,
    )  # fmt: skip
    assert (failure.tick, failure.allocated_bytes, failure.reserved_bytes, failure.by_category) == (0, 0, 0, {})


def test_it_is_raised_at_the_very_operation():
    # GIVEN a model whose second layer's output does not fit
    seen = []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.narrow, self.wide = nn.Linear(8, 16), nn.Linear(16, 100_000, bias=False)

        def forward(self, data):
            hidden = self.narrow(data)
            seen.append("narrow")
            out = self.wide(hidden)
            seen.append("wide")
            return out

    def work():
        Watched().cuda()(torch.zeros(2000, 8).cuda())

    # WHEN it runs
    _, session = oom_of(256 * MIB, work)

    # THEN the first has run, and the failure is that of the second
    assert seen == ["narrow"]
    (failure,) = session.failures
    assert (failure.module, failure.phase, failure.step) == ("wide", Phase.FORWARD, 1)
    assert failure.op in ("aten.mm", "aten.addmm")
    assert failure.by_category["parameter"] == 4 * (8 * 16 + 16 + 16 * 100_000)
    assert failure.allocated_bytes >= sum(failure.by_category.values())


def grow(rows):
    model = network(4096).cuda()
    train(model, torch.optim.AdamW(model.parameters()), steps=3, rows=rows)


def update(width):
    model = nn.Linear(width, width).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, width).cuda()).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("capacity_mib", "work", "place"),
    [
        (10, lambda: update(2000), (Phase.SETUP, 0, "aten._to_copy")),
        (40, lambda: grow(4000), (Phase.FORWARD, 1, "aten.addmm")),
        (120, lambda: grow(4000), (Phase.FORWARD, 1, "aten.relu")),
        (200, lambda: grow(4000), (Phase.BACKWARD, 1, "aten.threshold_backward")),
        (70, lambda: update(2000), (Phase.OPTIMIZER, 1, "aten.zeros_like")),
        (95, lambda: update(2000), (Phase.OPTIMIZER, 1, "aten._foreach_sqrt")),
    ],
    ids=["move", "first layer", "second layer", "backward", "state", "update"],
)
def test_the_same_operation_every_time(capacity_mib, work, place):
    found = []
    for _ in range(3):
        _, session = oom_of(capacity_mib * MIB, work)
        (failure,) = session.failures
        found.append((failure.tick, failure.module, failure.message, failure.source))
        assert (failure.phase, failure.step, failure.op) == place

    assert len(set(found)) == 1


def test_the_programs_own_handling_runs_and_memory_is_usable_afterwards():
    # GIVEN a program that halves its batch when the device is full
    sizes = []
    with running(256 * MIB) as session:
        model = network(1024).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = 64 * 1024
        while rows:
            sizes.append(rows)
            try:
                train(model, optimizer, steps=1, rows=rows)
            except torch.cuda.OutOfMemoryError:
                rows //= 2
                torch.cuda.empty_cache()
                continue
            break
        allocated = torch.cuda.memory_allocated()
        train(model, optimizer, steps=2, rows=rows)

    # THEN it goes on with a smaller one, nothing of the failed ones is left, and the failures are known as handled
    assert len(sizes) > 1
    assert len(session.failures) == len(sizes) - 1
    assert allocated < 32 * MIB
    assert not session.unrecovered
    assert [failure.handled for failure in session.marked_failures(survived=False)] == [True] * len(session.failures)
    assert session.counter.num_steps == 3


def test_a_failure_that_was_not_recovered_from():
    session = make_session(256 * MIB)
    with session.running():
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                ask_too_much()

    assert session.unrecovered
    assert [failure.handled for failure in session.marked_failures(survived=False)] == [False, False]
    assert [failure.handled for failure in session.marked_failures(survived=True)] == [True, True]


def test_a_failure_in_the_backward_pass_reaches_the_program():
    def work():
        model = network(4096).cuda()
        loss = model(torch.randn(4000, 8).cuda()).sum()
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        del loss
        # Nothing of the failed pass is in the way.
        model(torch.randn(10, 8).cuda()).sum().backward()

    with running(200 * MIB) as session:
        work()

    assert [failure.phase for failure in session.failures] == [Phase.BACKWARD]


def test_a_convolution_without_workspace_is_noted():
    def told(capacity_bytes):
        with running(capacity_bytes) as session:
            layer = nn.Conv2d(64, 64, 3, padding=1).cuda().half()
            layer(torch.zeros(64, 64, 64, 64, dtype=torch.float16).cuda())
        return session.estimate("test", 0.0, died=False)

    # GIVEN what it takes with its workspace
    free = told(None)
    assert free.notes == ()

    # WHEN there is less
    full = told(free.replay.reserved_peak_bytes - 1)

    # THEN it runs, and what it can do without is no part of what it must have
    assert [note.code for note in full.notes] == ["workspace-dropped", "cache-released"]
    assert full.replay.allocated_peak_bytes < free.replay.allocated_peak_bytes
    assert free.certain_bytes < free.tight_bytes + 2**21 < free.peak_bytes


def test_a_device_so_full_that_the_cache_was_released_is_noted():
    with running(40 * MIB) as session:
        first = torch.zeros(16 * MIB, dtype=torch.uint8, device="cuda")
        del first
        second = torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda")
        assert second.numel()

    told = session.estimate("test", 0.0, died=False)
    assert [note.code for note in told.notes] == ["cache-released"]
    assert told.replay.num_retries == 1


# Threads, processes, the garbage collector


def test_threads_see_the_device_too():
    seen = []

    def work():
        tensor = torch.zeros(1000, device="cuda")
        seen.append((tensor.is_cuda, really(tensor), torch.cuda.memory_allocated()))
        tensor.requires_grad_().sum().backward()

    with running() as session:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
            thread.join()

    assert [found[:2] for found in seen] == [(True, "meta")] * 3
    assert all(allocated >= 4096 for _, _, allocated in seen)
    assert len(made(session, op="aten.zeros")) == 3


def test_threads_at_once_get_what_they_ask_for():
    failed = []

    def work():
        try:
            for size in range(1, 60):
                assert torch.zeros(size, 100, device="cuda").sum().is_cuda
        except BaseException as error:
            failed.append(error)

    with running() as session:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # Whoever came last has taken back what others had freed.
        torch.zeros(1, device="cuda")
        assert torch.cuda.memory_allocated() == 0

    assert failed == []
    assert len(made(session, op="aten.zeros")) == 4 * 59 + 1


def test_a_thread_that_outlives_the_session_works_on_the_host():
    started, ended = threading.Event(), threading.Event()
    seen = []

    def work():
        started.set()
        ended.wait(10)
        seen.append(float(torch.ones(3).sum()))

    with running():
        thread = threading.Thread(target=work)
        thread.start()
        started.wait(10)
    ended.set()
    thread.join()

    assert seen == [3.0]


class Numbers(Dataset):
    """Real tensors, made by workers with operators of their own."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0
        return torch.full((2, 8), float(index)).mul(2).add(1), torch.nn.functional.relu(torch.tensor(float(index)))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("pin_memory", [False, True], ids=["pageable", "pinned"])
def test_loaders_and_their_workers_give_real_batches(num_workers, pin_memory):
    if not num_workers:
        # Without workers items are made in this process.
        dataset = [(torch.full((2, 8), 2.0 * index + 1), torch.tensor(float(index))) for index in range(8)]
    else:
        dataset = Numbers()
    with running() as session:
        loader = DataLoader(dataset, batch_size=4, num_workers=num_workers, pin_memory=pin_memory)
        for _ in range(2):
            batches = list(loader)
            assert [data[:, 0, 0].tolist() for data, _ in batches] == [[1, 3, 5, 7], [9, 11, 13, 15]]
            assert [label.tolist() for _, label in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
            assert {really(data) for data, _ in batches} == {"cpu"}
        moved = batches[0][0].to("cuda", non_blocking=True)
        assert moved.is_cuda

    assert [block.size_bytes for block in made(session, category=Category.BATCH)] == [4 * 2 * 8 * 4]


def test_a_tensor_in_a_cycle_is_freed_when_the_collector_runs():
    class Node:
        pass

    with running() as session:
        node = Node()
        node.itself, node.tensor = node, torch.zeros(1000, device="cuda")
        gone = weakref.ref(node)
        del node
        gc.collect()
        assert gone() is None
        assert session.memory.allocated_bytes == 0


def test_collections_at_any_moment_do_no_harm():
    # GIVEN cycles that hold tensors, and a collector that runs in the middle of everything
    before = gc.get_threshold()
    with running() as session:
        gc.set_threshold(1, 1, 1)
        try:
            model = network().cuda()
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                for _ in range(5):
                    cycle = [torch.zeros(1000, device="cuda")]
                    cycle.append(cycle)
                    del cycle
                train(model, optimizer, steps=1)
        finally:
            gc.set_threshold(*before)
        gc.collect()

    told = session.estimate("test", 0.0, died=False)
    assert told.timeline.num_ticks == len(told.replay.allocated)
    assert all(block.end is not None for block in made(session, op="aten.zeros"))


def test_storages_that_shrink_and_grow_are_followed():
    with running() as session:
        tensor = torch.zeros(1000, device="cuda")
        tensor.untyped_storage().resize_(0)
        assert session.memory.allocated_bytes == 0
        tensor.untyped_storage().resize_(8000)
        assert session.memory.allocated_bytes == 8192
        host = torch.zeros(4)
        host.untyped_storage().resize_(1600)
        elsewhere = torch.zeros(4, device="meta")
        elsewhere.untyped_storage().resize_(1600)
        assert session.memory.allocated_bytes == 8192


# Values


def test_values_that_came_from_the_host_are_known():
    with running() as session:
        lengths = torch.tensor([3, 5]).cuda()
        assert lengths.max().item() == 5
        assert lengths.tolist() == [3, 5]
        assert lengths[lengths > 3].shape == (1,)
        assert (lengths.cpu() == torch.tensor([3, 5])).all()

    assert codes(session) == []


def test_values_that_a_model_computed_stand_in():
    with running() as session:
        out = network().cuda()(batch()[0])
        assert out.sum().item() == 1.0
        # Ones, of numbers that a program may divide by.
        assert out.cpu().tolist() == [[1.0, 1.0]] * 4
        assert not out.isnan().any()

    assert set(codes(session)) == {"stand-in-value"}


def test_settings_that_are_not_simulated_are_noted():
    def configure(report):
        report("garbage_collection_threshold isn't simulated")

    with running(configure=configure) as session:
        torch.zeros(3, device="cuda")

    assert codes(session) == ["allocator-settings"]


def test_the_failure_that_was_the_end_of_it_is_in_the_estimate():
    with running(10 * MIB) as session, pytest.raises(torch.OutOfMemoryError):
        torch.zeros(100, MIB, device="cuda")

    assert session.estimate("test", 0.0, died=False).replay.out_of_memory is None
    lost = session.estimate("test", 0.0, died=True).replay.out_of_memory
    assert (lost.requested_bytes, lost.allocated_bytes) == (400 * MIB, 0)


def test_activations_of_a_step_that_was_not_finished_show_as_such():
    with running(30 * MIB) as session, pytest.raises(torch.OutOfMemoryError):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(20))).cuda()
        model(torch.zeros(2048, 256, device="cuda"))

    (failure,) = session.failures
    assert failure.by_category["activation"] >= 2 * 2048 * 256 * 4


def test_libraries_that_are_imported_later_are_what_they_were_afterwards():
    with running():
        extensions = importlib.import_module("torch.utils.cpp_extension")
        inside = extensions.load_inline

    assert extensions.load_inline is not inside
    assert extensions.load_inline.__module__ == "torch.utils.cpp_extension"


def test_buckets_of_gradients_are_gradients():
    with running() as session:
        bucket = torch.zeros(100, device="cuda")
        session._classify(bucket, Category.GRADIENT, "")

    assert [block.size_bytes for block in made(session, category=Category.GRADIENT)] == [400]


def test_a_visit_leaves_the_optimizer_as_it_was():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with visiting():
        model.cuda()
        model(torch.zeros(2, 4, device="cuda")).sum().backward()
        optimizer.step()
        assert optimizer.state[model.weight]["momentum_buffer"].is_cuda

    assert dict(optimizer.state) == {}
    # It can go on.
    optimizer.zero_grad()
    model(torch.zeros(2, 4)).sum().backward()
    optimizer.step()
    assert really(optimizer.state[model.weight]["momentum_buffer"]) == "cpu"


def test_a_long_run_has_a_short_timeline(monkeypatch):
    monkeypatch.setattr(live_recorder, "_MANY_BLOCKS", 200)
    monkeypatch.setattr(live_recorder, "_RECENT_TICKS", 50)

    def train(steps):
        with running() as session:
            model = network().cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(steps):
                optimizer.zero_grad()
                model(batch()[0]).sum().backward()
                optimizer.step()
        return session

    short, long = train(2), train(100)

    assert len(timeline(long).blocks) < 400
    assert codes(short) == []
    assert codes(long) == ["timeline-shortened"]
    told, expected = (s.estimate("test", 0.0, died=False) for s in (long, short))
    assert told.replay.allocated_peak_bytes == expected.replay.allocated_peak_bytes
    assert told.timeline.peak()[1] == expected.timeline.peak()[1]


def test_models_and_optimizers_of_the_program_are_seen():
    with running(steps=5) as session:
        train(network().cuda(), torch.optim.Adam(network().cuda().parameters()))
        model = network().cuda()
        train(model, torch.optim.RMSprop(model.parameters()))

    assert session.seen.models == ("Sequential", "Sequential")
    assert session.seen.optimizers == ("Adam",)
    assert session.seen.fusable
    assert session.seen.work == ()


def test_the_work_of_the_last_whole_step_is_seen():
    # GIVEN a program that evaluates between its steps
    with running(watch=True) as session:
        model = network().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, steps=1)
        with torch.no_grad():
            model(batch(1000)[0])
        train(model, optimizer, steps=1)

    # THEN one step's operators are there, with their modules and phases
    work = session.seen.work
    products = [(one.module, one.phase, one.flops) for one in work if one.op in ("aten.addmm", "aten.mm")]
    assert products[:2] == [("0", Phase.FORWARD, 2 * 4 * 8 * 16), ("2", Phase.FORWARD, 2 * 4 * 16 * 2)]
    assert {phase for _, phase, _ in products[2:]} == {Phase.BACKWARD}
    assert any(one.phase is Phase.OPTIMIZER for one in work)
    assert max(one.moved_bytes for one in work) < 1000 * 8 * 4


@pytest.mark.parametrize("average", [torch.float32, torch.float16, torch.float64], ids=str)
def test_a_copy_of_the_weights_is_no_input(average):
    # GIVEN an average of the weights that no module holds, made on the host and moved
    with running() as session:
        model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 32))
        copies = [parameter.detach().clone().to(average) for parameter in model.parameters()]
        model.cuda()
        copies = [copy.cuda() for copy in copies]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.rand(4, 64).cuda()
        model(batch).sum().backward()
        optimizer.step()
        in_batch = sum(block.size_bytes for block in made(session, category=Category.BATCH))
        kept = sum(block.size_bytes for block in made(session, category=Category.BUFFER))
    assert kept == sum(copy.numel() * copy.element_size() for copy in copies)
    assert in_batch == batch.numel() * 4


def test_data_of_the_size_of_one_weight_stay_input():
    with running() as session:
        model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 32))
        data = torch.rand(128, 64).cuda()
        model.cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(data).sum().backward()
        optimizer.step()
        sizes = [block.size_bytes for block in made(session, category=Category.BATCH)]
    assert sizes == [128 * 64 * 4]

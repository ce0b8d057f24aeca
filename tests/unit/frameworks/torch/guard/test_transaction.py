"""An update that either happens or leaves no trace."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.guard_cases import MESSAGE
from memfit.core.settings import Settings
from memfit.frameworks.torch.apply.recomputation import recompute
from memfit.frameworks.torch.guard.ranks import TrainingRanks
from memfit.frameworks.torch.guard.transaction import PooledStatistics, Transaction

BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def loss(model, batch):
    return model(batch).square().mean()


def make(*, dropout=0.3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return Transaction(model, optimizer, TrainingRanks(), **options)


def whole(batch):
    return Settings()


def halves(batch):
    return Settings(2, micro_batch_size=3)


def failing(times):
    """A loss that runs out of memory, after the forward pass, so many times."""
    left = [times]

    def compute(model, batch):
        value = loss(model, batch)
        if left[0]:
            left[0] -= 1
            raise RuntimeError(MESSAGE.format(size=100))
        return value

    return compute


def state(transaction):
    return copy.deepcopy(
        (transaction.model.state_dict(), transaction.optimizer.state_dict(), torch.get_rng_state().tolist())
    )


def assert_equal(one, other):
    assert one[2] == other[2]
    for name in one[0]:
        assert torch.equal(one[0][name], other[0][name]), name
    assert one[1]["param_groups"] == other[1]["param_groups"]
    assert one[1]["state"].keys() == other[1]["state"].keys()
    for key, values in one[1]["state"].items():
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[1]["state"][key][name]))


def test_a_failed_window_is_rolled_back():
    transaction = make()
    before = state(transaction)
    transaction.open(1)
    transaction.add(failing(1), BATCH)

    failure = transaction.run(whole, again=False)
    transaction.roll_back()

    assert failure is not None and failure.requested_bytes == 100
    assert_equal(state(transaction), before)
    assert all(parameter.grad is None for parameter in transaction.model.parameters())


@pytest.mark.parametrize("settings_of", [whole, halves])
def test_a_replay_comes_to_what_it_would_have_been(settings_of):
    # GIVEN two equal models, of which one fails twice on the way
    done = []
    for failures in (0, 2):
        transaction = make()
        torch.manual_seed(7)
        for _ in range(3):
            transaction.open(1)
            transaction.add(failing(failures), BATCH)
            again = False
            while transaction.run(settings_of, again=again) is not None:
                transaction.roll_back()
                again = True
            assert transaction.finish() is None
            assert transaction.commit()
        done.append(state(transaction))

    # THEN
    assert_equal(*done)


def test_another_error_is_the_callers():
    transaction = make()
    transaction.open(1)

    def broken(model, batch):
        raise RuntimeError("a bug")

    transaction.add(broken, BATCH)
    with pytest.raises(RuntimeError, match="a bug"):
        transaction.run(whole, again=False)


def test_a_failure_in_clipping_is_rolled_back():
    left = [1]

    def clip(model):
        next(model.parameters()).grad.mul_(0)
        if left.pop():
            raise MemoryError

    transaction = make(clip=clip)
    before = state(transaction)
    transaction.open(1)
    transaction.add(loss, BATCH)
    assert transaction.run(whole, again=False) is None

    assert transaction.finish() is not None
    transaction.roll_back()

    assert_equal(state(transaction), before)


def test_a_scaler_can_unscale_again_after_a_roll_back():
    scaler = torch.amp.GradScaler("cpu")
    left = [True, False]

    def clip(model):
        if left.pop(0):
            raise MemoryError

    transaction = make(scaler=scaler, clip=clip)
    transaction.open(1)
    transaction.add(loss, BATCH)
    assert transaction.run(whole, again=False) is None
    assert transaction.finish() is not None
    transaction.roll_back()

    assert transaction.run(whole, again=True) is None
    assert transaction.finish() is None
    assert transaction.commit()


def test_infinite_gradients_leave_the_update_out():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    transaction = make(scaler=scaler)
    before = [parameter.detach().clone() for parameter in transaction.model.parameters()]
    transaction.open(1)
    transaction.add(lambda model, batch: loss(model, batch) * float("inf"), BATCH)
    assert transaction.run(whole, again=False) is None
    assert transaction.finish() is None

    assert transaction.commit() is False
    assert scaler.get_scale() == 2.0
    for parameter, value in zip(transaction.model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def test_parts_without_weight_count_for_nothing():
    # GIVEN a loss that is no number where nothing counts
    targets = torch.tensor([-100, -100, -100, 0, 1, 0])

    def counted(model, batch):
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels), int((labels != -100).sum())

    done = []
    for settings_of in (whole, halves):
        torch.manual_seed(0)
        model = nn.Linear(4, 2).double()
        transaction = Transaction(model, torch.optim.SGD(model.parameters(), lr=0.1), TrainingRanks())
        transaction.open(1)
        entry = transaction.add(counted, (BATCH.double(), targets))
        assert transaction.run(settings_of, again=False) is None
        assert transaction.finish() is None
        assert transaction.commit()
        done.append((entry.value, model.weight.detach().clone()))

    torch.testing.assert_close(done[0], done[1], rtol=1e-12, atol=1e-14)


def test_where_nothing_counts_nothing_is_updated():
    transaction = make()
    before = state(transaction)[0]
    transaction.open(1)
    entry = transaction.add(lambda model, batch: (loss(model, batch), 0), BATCH)
    assert transaction.run(whole, again=False) is None
    assert transaction.finish() is None

    assert transaction.commit() is False
    assert entry.value is None
    assert torch.equal(transaction.model[0].weight, before["0.weight"])


def test_what_differs_under_micro_batches_is_said():
    transaction = make()

    assert transaction.differences(1) == ""
    assert "batch norm" in transaction.differences(2)
    assert "dropout" in transaction.differences(2)
    transaction.model.eval()
    assert transaction.differences(2) == ""


def test_moves_are_put_on_and_taken_off():
    transaction = make()
    transaction.open(1)
    transaction.add(loss, BATCH)

    assert transaction.run(lambda batch: Settings(checkpoint=("0",)), again=False) is None
    assert "forward" in vars(transaction.model[0])
    transaction.close()

    assert "forward" not in vars(transaction.model[0])


# Running statistics of batch norms are those of the whole batch, as far as they can be.


def norm(momentum=0.1):
    torch.manual_seed(0)
    made = nn.BatchNorm2d(4, momentum=momentum).double()
    made.running_mean.normal_()
    made.running_var.uniform_(0.5, 2)
    return made


def pooled(model, batch, parts):
    with PooledStatistics(model) as statistics:
        for part in batch.tensor_split(parts):
            statistics.part()
            model(part).sum().backward()


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_a_norm_counts_the_batch_once(momentum, parts):
    # GIVEN the same norm twice, the second of which sees the batch in parts
    whole, split = norm(momentum), norm(momentum)

    for seed in range(3):
        batch = torch.randn(7, 4, 3, 3, dtype=torch.double, generator=torch.Generator().manual_seed(seed)) * 3 + 1
        whole(batch)
        pooled(split, batch, parts)

    # THEN
    assert split.num_batches_tracked == whole.num_batches_tracked == 3
    torch.testing.assert_close(split.running_mean, whole.running_mean, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(split.running_var, whole.running_var, rtol=1e-12, atol=1e-14)
    assert split.momentum == momentum


def test_a_norm_that_is_used_twice_counts_twice():
    batch = torch.randn(6, 4, 3, 3, dtype=torch.double)
    whole, split = norm(), norm()
    whole(batch)
    whole(batch * 2)

    with PooledStatistics(split) as statistics:
        for part in batch.tensor_split(2):
            statistics.part()
            split(part)
            split(part * 2)

    assert split.num_batches_tracked == 2
    torch.testing.assert_close(split.running_mean, whole.running_mean)
    torch.testing.assert_close(split.running_var, whole.running_var)


def test_a_second_pass_in_the_backward_pass_does_not_count():
    batch = torch.randn(6, 4, 3, 3, dtype=torch.double)
    model = nn.Sequential(nn.Sequential(norm()))
    whole = norm()
    whole(batch)
    undo = recompute(model, ["0"])

    pooled(model, batch.requires_grad_(), 3)

    undo()
    assert model[0][0].num_batches_tracked == 1
    torch.testing.assert_close(model[0][0].running_mean, whole.running_mean)


def test_after_a_failure_everything_is_as_before():
    model = norm()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    with pytest.raises(MemoryError), PooledStatistics(model):
        model(torch.randn(3, 4, 3, 3, dtype=torch.double))
        raise MemoryError

    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])
    assert model.momentum == 0.1
    assert not model._forward_hooks


def test_norms_without_running_statistics_are_left_alone():
    model = nn.BatchNorm2d(4, track_running_stats=False)

    pooled(model, torch.randn(4, 4, 2, 2), 2)

    assert model.running_mean is None


def test_statistics_of_samples_are_averaged():
    whole, model = (nn.InstanceNorm1d(4, affine=True, track_running_stats=True, dtype=torch.double) for _ in range(2))
    batch = torch.randn(7, 4, 5, dtype=torch.double) * torch.arange(1.0, 8.0, dtype=torch.double)[:, None, None]
    whole(batch)

    pooled(model, batch, 3)

    torch.testing.assert_close(model.running_mean, whole.running_mean)
    torch.testing.assert_close(model.running_var, whole.running_var)

"""Running statistics of batch norms under micro-batches are those of the whole batch, as far as they can be."""

import pytest
import torch
from torch import nn

from memfit.frameworks.torch.apply.recomputation import recompute
from memfit.frameworks.torch.guard.pooled_statistics import PooledStatistics


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

"""A process on its own, and how the others are found."""

import torch
from torch import nn

from memfit.frameworks.torch.guard.ranks import TrainingRanks, ranks_of


def test_a_plain_model_is_trained_by_one_process():
    ranks = ranks_of(nn.Linear(2, 2))

    assert type(ranks) is TrainingRanks
    assert ranks.num_ranks == 1
    assert ranks.any(True) and not ranks.any(False)
    assert ranks.agree([3, -1]) == [3, -1]
    assert ranks.total(2.5) == 2.5


def test_one_pass_after_another():
    seen = []

    TrainingRanks().run(3, seen.append, lambda: seen.append(None))

    assert seen == [0, 1, 2]


def test_gradients_are_clipped_together():
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 2.0)

    TrainingRanks().clip_norm([parameter], 1.0)

    assert float(parameter.grad.norm()) <= 1.0

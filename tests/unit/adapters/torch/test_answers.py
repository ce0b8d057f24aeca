import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from memfit.adapters.torch.answers import autocast_answers, look_answers
from memfit.adapters.torch.autocast import Autocast
from memfit.adapters.torch.look import Look
from memfit.adapters.torch.places import Places
from memfit.adapters.torch.replacement import replaced
from tests.unit.adapters.torch.sessions import really, running

FIRST = torch.device("cuda", 0)


def lists():
    places = Places(FIRST)
    return autocast_answers(Autocast("cuda")), look_answers(Look(places), places)


def test_asking_for_the_lists_changes_nothing():
    given = [replacement for found in lists() for replacement in found]
    before = [vars(owner).get(name) for owner, name, _ in given]
    lists()

    assert all(vars(o).get(n) is then for (o, n, _), then in zip(given, before, strict=True))
    assert len({(id(owner), name) for owner, name, _ in given}) == len(given)


def test_autocast_for_cuda_is_there():
    answers, _ = lists()
    with replaced(answers):
        assert not torch.cuda.amp.common.amp_definitely_not_available()
        assert torch.cuda.is_bf16_supported()
        # Recurrent layers flatten the weights of those that cuDNN takes.
        assert not torch.backends.cudnn.is_acceptable(torch.zeros(2))


def test_clearing_the_cache_of_autocast_clears_both():
    cleared = []

    class Watched(Autocast):
        def clear_cache(self):
            cleared.append(self)

    autocast = Watched("cuda")
    with replaced(autocast_answers(autocast)):
        torch.clear_autocast_cache()

    assert cleared == [autocast]


def test_what_the_backward_pass_calls_sees_the_device():
    seen = []
    with running():
        data = torch.zeros(4, device="cuda", requires_grad=True)
        data.register_hook(lambda gradient: seen.append(gradient.is_cuda))
        data.exp().sum().backward()
        torch.autograd.grad(data.exp().sum(), data)

    assert seen == [True, True]


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_again_sees_the_device(reentrant):
    seen = []

    class Watched(nn.Module):
        def forward(self, data):
            seen.append(data.device)
            return data.exp() + torch.ones(4, device=data.device)

    with running():
        data = torch.zeros(4, device="cuda", requires_grad=True)
        checkpoint(Watched(), data, use_reentrant=reentrant).sum().backward()
        assert data.grad.is_cuda

    assert seen == [FIRST, FIRST]


def test_saved_tensors_may_be_kept_on_the_host():
    # GIVEN PyTorch's own hooks, which move what is saved to the host and back
    with running() as session:
        data = torch.zeros(1000, device="cuda", requires_grad=True)
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            out = data.exp()
            kept = out.exp()
        del out
        # Only the last result is on the device, besides the data.
        assert session.memory.allocated_bytes == 2 * 4096
        kept.sum().backward()
        assert data.grad.is_cuda


def test_tensors_are_grouped_by_where_they_are_said_to_be():
    with running(count=2):
        tensors = [torch.zeros(2, device="cuda:0"), torch.zeros(2, device="cuda:1"), torch.zeros(2)]
        groups = torch._C._group_tensors_by_device_and_dtype([tensors], True)

        found = {str(device): indices for (device, _), (_, indices) in groups.items()}
    assert found == {"cuda:0": [0], "cuda:1": [1], "cpu": [2]}


def test_tensors_made_of_others_may_be_said_to_be_on_the_device():
    with running():
        parts = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
        pair = TwoTensor(*parts)

        assert pair.is_cuda
        assert really(pair) == "meta"


def test_a_parameter_may_take_over_a_tensor_of_another_device():
    _, answers = lists()
    with replaced(answers):
        assert torch._has_compatible_shallow_copy_type(torch.zeros(2), torch.zeros(2, device="meta"))
        assert torch._has_compatible_shallow_copy_type(torch.zeros(2), torch.zeros(2))
        assert not torch._has_compatible_shallow_copy_type(torch.zeros(2), torch.eye(2).to_sparse())

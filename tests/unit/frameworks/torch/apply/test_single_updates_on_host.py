import pytest
import torch

from memfit.frameworks.torch.apply.single_updates import HostUpdates


def make_parameters():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(5, 4, dtype=torch.float64)) for _ in range(3)]


def set_gradients(parameters, number):
    for parameter in parameters:
        parameter.grad = torch.sin(parameter.detach() * (number + 2))


MAKERS = {
    "Adam": lambda held: torch.optim.Adam(held, lr=0.1),
    "AdamW": lambda held: torch.optim.AdamW([{"params": held[:1], "lr": 0.3}, {"params": held[1:]}], weight_decay=0.5),
    "SGD": lambda held: torch.optim.SGD(held, lr=0.1, momentum=0.9),
    "RMSprop": lambda held: torch.optim.RMSprop(held, lr=0.1, centered=True),
    "fused": lambda held: torch.optim.Adam(held, lr=0.1, fused=True),
}


@pytest.mark.parametrize("copies", [False, True], ids=["in place", "with copies"])
@pytest.mark.parametrize("name", MAKERS)
def test_updates_are_the_same(name, copies):
    # GIVEN an optimizer that has made a step
    expected, found = make_parameters(), make_parameters()
    plain, used = MAKERS[name](expected), MAKERS[name](found)
    for held, optimizer in ((expected, plain), (found, used)):
        set_gradients(held, 0)
        optimizer.step()

    # WHEN it goes on in host memory
    updates = HostUpdates(used, copies=copies)
    for number in (1, 2, 3):
        set_gradients(expected, number)
        plain.step()
        set_gradients(found, number)
        for parameter in found:
            updates.update(parameter)
    updates.close()

    # THEN parameters and state are the same, and a plain step goes on from there
    for held, optimizer in ((expected, plain), (found, used)):
        set_gradients(held, 4)
        optimizer.step()
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)
        for key, value in plain.state[a].items():
            assert torch.equal(value, used.state[b][key])


def test_values_changed_by_somebody_else_are_taken_over():
    (parameter, *_) = make_parameters()
    updates = HostUpdates(torch.optim.SGD([parameter], lr=0.5), copies=True)
    for start in (1.0, 10.0):
        with torch.no_grad():
            parameter.fill_(start)
        parameter.grad = torch.ones_like(parameter)
        updates.update(parameter)
        assert torch.equal(parameter, torch.full_like(parameter, start - 0.5))


def test_sparse_gradients_go_along():
    torch.manual_seed(0)
    results = []
    for copies in (None, True):
        layer = torch.nn.Embedding(6, 3, sparse=True, dtype=torch.float64)
        torch.nn.init.constant_(layer.weight, 0.5)
        optimizer = torch.optim.SparseAdam(layer.parameters(), lr=0.1)
        updates = HostUpdates(optimizer, copies=True) if copies else None
        for _ in range(2):
            optimizer.zero_grad()
            layer(torch.tensor([1, 4, 4])).square().sum().backward()
            optimizer.step() if updates is None else updates.update(layer.weight)
        results.append(layer.weight.detach().clone())
    assert torch.equal(*results)
    assert results[0][4, 0] != 0.5
    assert results[0][0, 0] == 0.5


def test_host_bytes_count_copies_and_state():
    parameters = make_parameters()
    updates = HostUpdates(torch.optim.Adam(parameters), copies=True)
    assert updates.host_bytes == 0
    set_gradients(parameters, 0)
    for parameter in parameters:
        updates.update(parameter)
    counters = 4 * len(parameters)
    assert updates.host_bytes == 3 * sum(p.numel() * 8 for p in parameters) + counters
    updates.close()
    assert updates.host_bytes == 3 * sum(p.numel() * 8 for p in parameters) + counters


def test_nothing_is_copied_where_the_device_is_the_host():
    parameters = make_parameters()
    updates = HostUpdates(torch.optim.Adam(parameters))
    set_gradients(parameters, 0)
    for parameter in parameters:
        updates.update(parameter)
    assert updates.host_bytes == 0


def test_shape_only_parameters_have_their_state_elsewhere():
    parameter = torch.nn.Parameter(torch.empty(5, 4, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    updates = HostUpdates(torch.optim.Adam([parameter], fused=False))
    updates.update(parameter)
    updates.update(parameter)
    assert updates.host_bytes == 3 * 80 + 4

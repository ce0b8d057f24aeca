import os
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import _get_current_dispatch_mode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from memfit.core.errors import BadFile  # noqa: E402
from memfit.frameworks.torch.rescue import Rescue, session  # noqa: E402
from tests.unit.frameworks.torch.rescue.failing import Failing  # noqa: E402


class Small(torch.nn.Module):
    """Large enough for its activations to be moved, with all that is hard to repeat."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.BatchNorm2d(4)
        self.second, self.head = torch.nn.Linear(128, 32), torch.nn.Linear(32, 2)

    def forward(self, inputs):
        hidden = torch.nn.functional.relu(self.norm(self.first(inputs)), inplace=True)
        hidden = torch.nn.functional.dropout(self.second(hidden), 0.2).tanh()
        return self.head(hidden)


def step(model, optimizer, inputs):
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def train(steps=2):
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(steps):
        step(model, optimizer, torch.randn(4, 1, 64, 128))
    return [*model.state_dict().values(), torch.get_rng_state()]


def same(found, expected):
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert _get_current_dispatch_mode() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.mark.parametrize("late", [False, True], ids=["before it ran", "after it ran"])
def test_any_operation_may_fail(late, monkeypatch):
    # The collector of cycles, for each of them, would take longer than all the rest.
    monkeypatch.setattr(session.oom, "release", lambda: None)
    # GIVEN the weights of an undisturbed run, and its operations
    expected = train(1)
    names = Failing(-1)
    with names, Rescue():
        found = train(1)
    assert same(found, expected)
    assert any("backward" in name for name in names.seen)

    moved = 0
    # WHEN each of them in turn runs out of memory once
    for number in range(len(names.seen)):
        with Failing(number, late=late), Rescue() as made:
            found = train(1)

        # THEN the weights are the same, bit by bit
        assert same(found, expected), names.seen[number]
        assert made.num_retried == 1 or late
        moved += made.moved_bytes
    assert moved > 0


def test_eager_and_plain_are_the_same():
    expected = train()
    with Rescue(eager=True) as made:
        assert same(train(), expected)
    assert made.moved_bytes > 0


def test_taken_off_while_memory_suffices_and_put_on_again(monkeypatch):
    with Rescue() as made:
        shares = iter([0.1, 0.1, 0.9, 0.9])
        monkeypatch.setattr(session, "peak_share", lambda _: next(shares))
        armed = []
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(6):
            armed.append((made.is_armed, _get_current_dispatch_mode() is not None))
            step(model, optimizer, torch.ones(1, 2))
    assert armed == [(True, True)] * 3 + [(False, False)] * 2 + [(True, True)]


def test_hooks_and_modes_of_the_script_are_left_alone(monkeypatch):
    # GIVEN a script that has hooks and a mode of its own around its loop
    with Rescue() as made:
        monkeypatch.setattr(session, "peak_share", lambda _: 0.1)
        own = Failing(-1)
        with torch.autograd.graph.save_on_cpu(), own:
            top = torch._C._autograd._top_saved_tensors_default_hooks(False)
            # WHEN the rescue would be taken off
            train(4)
            # THEN that waits: those on top are the script's
            assert made.is_armed
            assert _get_current_dispatch_mode() is own
            assert torch._C._autograd._top_saved_tensors_default_hooks(False) == top
        train(1)
        assert not made.is_armed


def test_the_script_may_use_checkpoints_and_transformations():
    model = Small()
    inputs = torch.randn(4, 1, 64, 128)

    def gradients():
        torch.manual_seed(0)
        model.zero_grad()
        scale = torch.func.grad(lambda value: value.square().sum())(inputs)
        checkpoint(model, inputs + scale, use_reentrant=False).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients()
    with Rescue(eager=True):
        assert same(gradients(), expected)


def test_other_threads_change_nothing():
    with Rescue() as made:
        thread = threading.Thread(target=made.disarm)
        thread.start()
        thread.join()
        assert made.is_armed


def test_says_what_it_did(capsys, monkeypatch):
    events = []
    monkeypatch.setattr(session, "note", lambda event, **values: events.append((event, values)))
    with Failing(30), Rescue() as made:
        train(1)
    assert made.num_retried == 1
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("memfit rescue: memory ran out in aten.")
    assert shown[-1].startswith("memfit rescue: 1 operations ran again, ")
    assert [name for name, _ in events] == ["rescue", "rescued"]


def test_a_full_disk_is_said_and_the_error_is_the_scripts(capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(session.copies, "MappedFile", full)
    names = Failing(-1)
    with names:
        train(1)
    position = next(number for number, name in enumerate(names.seen) if "tanh_backward" in name)
    with pytest.raises(RuntimeError, match="can't allocate memory"), Failing(position), Rescue():
        train(1)
    assert "activations can't be moved any more: No space left on device" in capsys.readouterr().err


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(BadFile, match="is no folder"):
        Rescue(folder=str(tmp_path / "missing"))


def test_a_forked_process_sums_up_nothing(capsys, monkeypatch):
    with Rescue(eager=True) as made:
        train(1)
        monkeypatch.setattr(os, "getpid", lambda: -1)
        made._sum_up()
        monkeypatch.undo()
        assert capsys.readouterr().err == ""


STATUS = """Name:\tpython
VmPeak:\t  4000 kB
VmHWM:\t    1000 kB
VmRSS:\t     400 kB
VmData:\t    800 kB
"""


@pytest.fixture
def status(tmp_path):
    path = tmp_path / "status"
    path.write_text(STATUS)
    return path


@pytest.mark.parametrize(
    ("limits", "share"),
    [((None, None), 0.5), ((2000 * 1024, None), 0.7), ((None, 4400 * 1024), 4000 / 4400)],
)
def test_the_greatest_share_counts(status, monkeypatch, limits, share):
    monkeypatch.setattr(session, "limits", lambda: limits)
    assert session.peak_share(2000 * 1024, status) == pytest.approx(share)


def test_nothing_known_counts_as_full(tmp_path):
    assert session.peak_share(1, tmp_path / "missing") == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_this_process_has_a_share():
    assert 0 < session.peak_share(2**50) < 1

import gc
import signal
import threading

import pytest
import torch
from torch import nn

from memfit.core.patching import Replacement, replaced
from memfit.frameworks.torch.script.steps import EndOfRun, StepCounter, call_before_updates


@pytest.fixture
def watched():
    """Makes counters that watch; they stop when the test ends."""
    handles = []

    def watch(*args):
        counter = StepCounter(*args)
        handles.extend(counter.watch())
        return counter

    yield watch
    for handle in handles:
        handle.remove()


def make_optimizer():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.1)


def test_the_run_ends_after_the_steps_wanted(watched):
    counter = watched(3)
    optimizer = make_optimizer()
    optimizer.step()
    optimizer.step()
    assert counter.num_steps == 2

    with pytest.raises(EndOfRun):
        optimizer.step()
    assert counter.num_steps == 3
    # The step was taken before the run ended.
    assert torch.allclose(optimizer.param_groups[0]["params"][0], torch.full((2,), 0.7))


def test_the_end_is_an_orderly_exit_that_handlers_of_errors_let_pass():
    with pytest.raises(SystemExit) as caught:
        try:
            raise EndOfRun
        except Exception:
            pytest.fail("caught as an error")

    assert caught.value.code == 0


def test_of_two_optimizers_both_must_take_the_steps(watched):
    counter = watched(2)
    first, second = make_optimizer(), make_optimizer()
    counter.made(first)
    counter.made(second)
    first.step()
    first.step()
    first.step()
    second.step()
    assert counter.num_steps == 3

    with pytest.raises(EndOfRun):
        second.step()


def test_an_optimizer_that_is_never_used_does_not_keep_the_run_going(watched):
    counter = watched(2)
    unused = make_optimizer()
    counter.made(unused)
    used = make_optimizer()
    for _ in range(9):
        used.step()

    with pytest.raises(EndOfRun):
        used.step()
    assert counter.num_steps == 10


def test_an_optimizer_that_is_gone_is_not_waited_for(watched):
    counter = watched(2)
    gone, kept = make_optimizer(), make_optimizer()
    counter.made(gone)
    counter.made(kept)
    del gone
    gc.collect()
    kept.step()

    with pytest.raises(EndOfRun):
        kept.step()


def test_without_an_optimizer_updates_by_hand_are_steps():
    counter = StepCounter(2)
    for _ in range(2):
        counter.begin_backward()
        counter.end_backward()
        # Several parameters are changed in one step.
        counter.updated_by_hand()
        counter.updated_by_hand()
    assert (counter.num_steps, counter.has_optimizer) == (2, False)

    # The update by hand comes after the backward pass, so that the run ends at the next.
    with pytest.raises(EndOfRun):
        counter.begin_backward()
    assert counter.num_steps == 2


def test_with_an_optimizer_backward_passes_are_no_steps():
    counter = StepCounter(1)
    optimizer = make_optimizer()
    counter.made(optimizer)
    for _ in range(10):
        counter.begin_backward()
        counter.end_backward()

    assert counter.num_steps == 0


def test_an_optimizer_made_after_backward_passes_counts_alone(watched):
    # GIVEN a backward pass before the optimizer is there, as to try out the model
    counter = watched(5)
    counter.begin_backward()
    counter.end_backward()
    assert counter.num_steps == 0

    # WHEN training begins
    make_optimizer().step()

    assert counter.num_steps == 1


def test_others_hear_of_each_step_before_and_after_it(watched):
    heard = []
    counter = watched(
        9, lambda opt: heard.append(("before", counter.num_steps)), lambda opt: heard.append((opt, counter.num_steps))
    )
    optimizer = make_optimizer()
    optimizer.step()
    optimizer.step()

    assert heard == [("before", 0), (optimizer, 1), ("before", 1), (optimizer, 2)]


def test_optimizers_are_heard_of_when_they_are_made():
    counter = StepCounter(1)
    plain = torch.optim.Optimizer.__init__
    with replaced([Replacement(torch.optim.Optimizer, "__init__", counter.counting_init())]):
        optimizer = make_optimizer()

    assert counter.has_optimizer
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.optim.Optimizer.__init__ is plain


def test_afterwards_nothing_is_counted():
    counter = StepCounter(1)
    for handle in counter.watch():
        handle.remove()
    make_optimizer().step()

    assert counter.num_steps == 0


def test_that_it_has_ended_is_known(watched):
    counter = watched(2)
    optimizer = make_optimizer()
    optimizer.step()
    assert not counter.has_ended

    with pytest.raises(EndOfRun):
        optimizer.step()
    assert counter.has_ended


def test_a_program_that_goes_on_after_its_end_is_heard_of_and_ended_again(watched):
    # GIVEN a program that catches everything
    counter, heard = watched(2), []
    counter.ignored = lambda: heard.append(counter.num_steps)
    optimizer = make_optimizer()
    ends = 0
    for _ in range(4):
        try:
            optimizer.step()
        except BaseException:
            ends += 1

    # THEN its first end is none that it ignored
    assert ends == 3
    assert heard == [3, 4]


@pytest.fixture
def interruptible():
    """Whatever started the tests may have had interrupts ignored, as `nohup` and shell scripts do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_step_in_another_thread_ends_the_main_one(watched, interruptible):
    # GIVEN a program that trains in a thread and waits for it
    counter, raised = watched(1), []

    def work():
        try:
            make_optimizer().step()
        except BaseException as error:
            raised.append(type(error))

    # WHEN the last step is taken there
    with pytest.raises(KeyboardInterrupt):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        # The interrupt may arrive a moment after the thread is gone.
        threading.Event().wait(60)

    # THEN both are ended
    thread.join()
    assert raised == [SystemExit]
    assert counter.has_ended


def test_without_an_optimizer_or_a_visible_update_passes_are_the_steps(watched):
    # GIVEN a program whose updates make new tensors, which nobody sees
    counter = watched(2)
    for _ in range(40):
        counter.begin_backward()
        counter.end_backward()

    # THEN its backward passes are its steps, and there is an end to them
    assert (counter.num_steps, counter.num_passes) == (0, 40)
    with pytest.raises(EndOfRun):
        counter.begin_backward()
    assert counter.has_ended
    # WHEN an update is seen after all, those are the steps
    counter.updated_by_hand()
    assert (counter.num_steps, counter.num_passes) == (1, 0)


def test_updates_are_told_of_before_they_change_anything_until_the_handle_is_removed():
    optimizer = make_optimizer()

    def end():
        raise EndOfRun

    handle = call_before_updates(end)
    with pytest.raises(EndOfRun):
        optimizer.step()
    assert optimizer.param_groups[0]["params"][0].tolist() == [1, 1]

    handle.remove()
    optimizer.step()

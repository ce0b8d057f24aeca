"""Training that runs out of memory at random points comes to the same bits as training that never did."""

import itertools

import pytest
import torch

from benchmarks.guard_cases import MODELS, OPTIMIZERS, Case, Schedule, guarded_loop, largest_difference, plain_loop

KINDS = list(itertools.product(MODELS, OPTIMIZERS, (False, True)))
STEPS = 50
SAMPLE = 12
ALL = 504
PHASES = set()


def run(seed, steps):
    model, optimizer, scaled = KINDS[seed % len(KINDS)]
    case = Case(model, optimizer, scaled, seed=seed)
    schedule = Schedule(seed, steps)
    guarded = guarded_loop(case, steps, schedule)
    return case, guarded


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(SAMPLE))
def test_failures_leave_no_trace_in_the_weights(seed):
    # GIVEN a run of which some steps fail in the forward or backward pass, in clipping or in the update
    case, guarded = run(seed, 10)

    # THEN its weights are those of a plain loop with the same micro-batches, bit by bit
    PHASES.update(phase for _, phase in guarded.raised)
    assert largest_difference(guarded.model, plain_loop(case, guarded.parts)) == 0


def test_the_sample_has_failures_in_every_phase():
    if len(PHASES) < 4:
        PHASES.update(phase for seed in range(SAMPLE) for _, phase in run(seed, 10)[1].raised)

    assert not {"forward", "backward", "clip", "update"} - PHASES


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(ALL))
def test_failures_leave_no_trace_in_the_weights_of_long_runs(seed):
    case, guarded = run(seed, STEPS)

    assert largest_difference(guarded.model, plain_loop(case, guarded.parts)) == 0


@pytest.mark.parametrize("accumulate", [2, 5])
@pytest.mark.parametrize("model", MODELS)
def test_a_failure_in_a_window_replays_the_window(model, accumulate):
    case = Case(model, "adam", seed=3)
    guarded = guarded_loop(case, 12, Schedule(5, 12, rate=0.25), accumulate, grow_after=1000)

    assert guarded.raised
    # Batches of a window before the failure were run again in as many parts as those after it.
    parts = list(guarded.parts)
    for start in range(0, 12, accumulate):
        window = slice(start, min(12, start + accumulate))
        parts[window] = [max(parts[window])] * len(parts[window])
    assert largest_difference(guarded.model, plain_loop(case, parts, accumulate)) == 0


@pytest.mark.parametrize("ragged", [False, True], ids=["samples", "tokens"])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("model", ["transformer", "lstm"])
def test_micro_batches_give_the_gradient_of_the_whole_batch(model, seed, ragged):
    # GIVEN float64 and no dropout, whose masks would differ
    case = Case(model, "sgd", dropout=0.0, seed=seed, dtype=torch.float64, ragged=ragged)

    guarded = guarded_loop(case, 8, micro_batch_size=3, grow_after=1000)

    assert set(guarded.parts) == {6}
    assert largest_difference(guarded.model, plain_loop(case, [1] * 8)) <= 1e-12


@pytest.mark.parametrize("model", MODELS)
def test_a_window_gives_the_gradient_of_its_batches_together(model):
    case = Case(model, "sgd", dropout=0.0, dtype=torch.float64, ragged=model != "cnn")

    guarded = guarded_loop(case, 7, accumulate=3, micro_batch_size=3, grow_after=1000)

    # The last window holds one batch, and counts as one.
    assert largest_difference(guarded.model, plain_loop(case, [1] * 7, 3)) <= 1e-12

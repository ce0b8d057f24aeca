"""Optimizers that accelerate has prepared."""

import torch

from memfit.frameworks.torch.guard.accelerate_loop import unwrapped


def prepared(optimizer, scaler=None):
    made = type("AcceleratedOptimizer", (), {"__module__": "accelerate.optimizer"})()
    made.optimizer, made.scaler = optimizer, scaler
    return made


def test_a_plain_optimizer_stays_as_it_is():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])

    assert unwrapped(optimizer, None) == (optimizer, None)


def test_a_prepared_optimizer_is_taken_out_of_all_its_wrappers():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])

    assert unwrapped(prepared(prepared(optimizer)), None) == (optimizer, None)


def test_the_scaler_of_the_accelerator_is_found_and_a_given_one_comes_first():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])

    assert unwrapped(prepared(optimizer, "its own"), None) == (optimizer, "its own")
    assert unwrapped(prepared(optimizer, "its own"), "given") == (optimizer, "given")


def test_wrappers_of_others_are_left_alone():
    class Wrapper:
        optimizer = "inner"

    wrapper = Wrapper()

    assert unwrapped(wrapper, None) == (wrapper, None)

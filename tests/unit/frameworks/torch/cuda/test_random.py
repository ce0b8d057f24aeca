import copy
import pickle

import pytest
import torch

from memfit.frameworks.torch.cuda.random import SimulatedGenerator
from tests.unit.frameworks.torch.machines import machine


def test_a_generator_of_the_device_can_be_made():
    with machine(count=2):
        for device, shown in (("cuda", "cuda:0"), (torch.device("cuda", 1), "cuda:1"), (0, "cuda:0")):
            generator = torch.Generator(device=device)
            assert generator.device == torch.device(shown)
            assert isinstance(generator, torch.Generator)
            assert isinstance(generator, SimulatedGenerator)
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.Generator("cuda:2")


def test_generators_of_the_host_stay_what_they_are():
    with machine():
        for generator in (torch.Generator(), torch.Generator("cpu"), torch.default_generator):
            assert isinstance(generator, torch.Generator)
            assert not isinstance(generator, SimulatedGenerator)
        numbers = torch.randperm(5, generator=torch.Generator().manual_seed(1)).tolist()

    assert numbers == torch.randperm(5, generator=torch.Generator().manual_seed(1)).tolist()


def test_operators_on_shapes_take_it():
    generator = SimulatedGenerator()

    assert torch.randn(2, device="meta", generator=generator).shape == (2,)
    assert torch.empty(3, device="meta").bernoulli_(generator=generator).shape == (3,)


def test_seeds_and_offsets():
    generator = SimulatedGenerator()

    assert generator.manual_seed(7) is generator
    assert generator.initial_seed() == 7
    generator.set_offset(12)
    assert generator.get_offset() == 12
    assert generator.manual_seed(-1).initial_seed() == 2**64 - 1
    assert generator.get_offset() == 0
    assert generator.seed() == generator.initial_seed()


def test_a_state_is_a_seed_and_an_offset_on_the_host():
    generator = SimulatedGenerator().manual_seed(2**40)
    generator.set_offset(4)
    state = generator.get_state()

    assert (state.dtype, state.device.type, state.shape) == (torch.uint8, "cpu", (16,))
    other = SimulatedGenerator().set_state(state)
    assert (other.initial_seed(), other.get_offset()) == (2**40, 4)
    assert other.clone_state().initial_seed() == 2**40
    assert SimulatedGenerator().graphsafe_set_state(other.graphsafe_get_state()).get_offset() == 4


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (torch.zeros(16), TypeError, "must be a torch.ByteTensor"),
        (torch.zeros(15, dtype=torch.uint8), RuntimeError, "wrong size"),
    ],
)
def test_other_states_are_refused(state, error, message):
    with pytest.raises(error, match=message):
        SimulatedGenerator().set_state(state)


def test_generators_can_be_copied_and_pickled():
    generator = SimulatedGenerator(1).manual_seed(5)

    for other in (copy.deepcopy(generator), pickle.loads(pickle.dumps(generator))):
        assert (other.initial_seed(), other.device) == (5, torch.device("cuda", 1))


def test_every_way_to_seed_the_device():
    with machine(count=2):
        torch.manual_seed(3)
        assert torch.cuda.initial_seed() == 3
        torch.cuda.manual_seed(4)
        torch.cuda.manual_seed_all(5)
        assert [generator.initial_seed() for generator in torch.cuda.default_generators] == [5, 5]
        torch.cuda.seed()
        torch.cuda.seed_all()
        first, second = (generator.initial_seed() for generator in torch.cuda.default_generators)
        assert first == second


def test_states_of_all_devices_are_saved_and_restored():
    with machine(count=2):
        torch.cuda.manual_seed_all(3)
        states = torch.cuda.get_rng_state_all()
        torch.cuda.manual_seed_all(4)
        torch.cuda.set_rng_state_all(states)
        torch.cuda.random.set_rng_state(torch.cuda.get_rng_state(0), device="cuda:1")

        assert torch.cuda.initial_seed() == 3


def test_a_fork_of_the_random_state_leaves_no_trace():
    with machine():
        torch.cuda.manual_seed(3)
        with torch.random.fork_rng():
            torch.cuda.manual_seed(4)
        with torch.random.fork_rng(devices=[0], device_type="cuda"):
            torch.manual_seed(5)

        assert torch.cuda.initial_seed() == 3


def test_a_class_of_the_users_own_is_left_alone():
    with machine():

        class Mine(torch.Generator):
            pass

        assert isinstance(Mine(), Mine)
        assert not isinstance(torch.Generator(), Mine)


def test_afterwards_the_class_is_pytorchs_own():
    before = torch.Generator

    with machine():
        assert torch.Generator is not before

    assert torch.Generator is before
    assert torch.cuda.default_generators == ()

"""Random number generators of the simulated device.

No numbers are drawn there, but programs seed generators, save their states and pass them to operators. A simulated
generator is one of the host's, so that operators take it, which says it is on the device and whose state is as small as
one of CUDA: a seed and an offset.
"""

import random
from typing import Any

import torch

from memfit.core.patching import Replacement
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.cuda.devices import CudaDevices

# CUDA's generator starts with this (c10::default_rng_seed_val).
_DEFAULT_SEED = 67280421310721
_STATE_BYTES = 16


class SimulatedGenerator(torch.Generator):
    """What `torch.Generator("cuda")` returns."""

    is_simulated = True

    def __new__(cls, index: int = 0) -> "SimulatedGenerator":
        """The host's generator underneath."""
        return super().__new__(cls, device="cpu")  # type: ignore[call-arg]

    def __init__(self, index: int = 0) -> None:
        self._index = index
        self._seed = _DEFAULT_SEED
        self._offset = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where it says it is."""
        return torch.device("cuda", self._index)

    def manual_seed(self, seed: int) -> "SimulatedGenerator":
        """Begins anew with a seed."""
        self._seed, self._offset = int(seed) % 2**64, 0
        return self

    def seed(self) -> int:
        """Begins anew with a seed of its own choice."""
        # Not Python's global generator, whose numbers belong to the program.
        self.manual_seed(random.SystemRandom().getrandbits(52))
        return self._seed

    def initial_seed(self) -> int:
        """The last seed."""
        return self._seed

    def get_offset(self) -> int:
        """How far it has come."""
        return self._offset

    def set_offset(self, offset: int) -> "SimulatedGenerator":
        """Sets how far it has come."""
        self._offset = int(offset)
        return self

    def get_state(self) -> torch.Tensor:
        """Seed and offset, in a tensor on the host."""
        content = self._seed.to_bytes(8, "little") + self._offset.to_bytes(8, "little")
        with internals.disable_torch_function():
            return torch.frombuffer(bytearray(content), dtype=torch.uint8).clone()

    def set_state(self, new_state: torch.Tensor) -> "SimulatedGenerator":
        """Takes what `get_state` gave."""
        with internals.disable_torch_function():
            if new_state.dtype != torch.uint8 or new_state.device.type != "cpu":
                raise TypeError("RNG state must be a torch.ByteTensor")
            content = bytes(new_state.tolist())
        if len(content) != _STATE_BYTES:
            raise RuntimeError("RNG state is wrong size")
        self._seed = int.from_bytes(content[:8], "little")
        self._offset = int.from_bytes(content[8:], "little")
        return self

    def clone_state(self) -> "SimulatedGenerator":
        """Another generator in the same state."""
        return SimulatedGenerator(self._index).set_state(self.get_state())

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, other: "SimulatedGenerator") -> "SimulatedGenerator":  # type: ignore[override]
        """Takes the state of another generator."""
        return self.set_state(other.get_state())

    def __reduce__(self) -> Any:
        return _rebuild, (self._index, bytes(self.get_state().tolist()))


def _rebuild(index: int, content: bytes) -> SimulatedGenerator:
    state = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return SimulatedGenerator(index).set_state(state)


def random_replacements(devices: CudaDevices, count: int) -> list[Replacement]:
    """The default generators, one for each of `count` devices, and `torch.Generator` with a device."""
    plain: Any = torch.Generator

    class Either(type(plain)):  # type: ignore[misc]
        def __call__(cls, *arguments: Any, **options: Any) -> Any:
            if cls is not stand_in:
                return super().__call__(*arguments, **options)
            wanted = arguments[0] if arguments else options.get("device", "cpu")
            index = wanted if isinstance(wanted, int) else torch.device(wanted).index
            if not isinstance(wanted, int) and torch.device(wanted).type != "cuda":
                return plain(*arguments, **options)
            index = devices.current if index is None else index
            devices.check(index)
            return SimulatedGenerator(index)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, plain) if cls is stand_in else super().__instancecheck__(instance)

    stand_in: Any = Either("Generator", (plain,), {"__module__": "torch", "__doc__": plain.__doc__})
    return [
        Replacement(torch, "Generator", stand_in),
        Replacement(torch.cuda, "default_generators", tuple(map(SimulatedGenerator, range(count)))),
    ]

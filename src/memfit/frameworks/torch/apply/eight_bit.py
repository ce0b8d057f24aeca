"""Adam with moments of 8 bits: a quarter of the state, and less of the bandwidth.

Moments are kept as one byte per element and one float32 per 256 (Dettmers et al., https://arxiv.org/abs/2110.02861), in
the state of the user's own optimizer. On CUDA one kernel of bitsandbytes does the whole update. Elsewhere its
quantisation kernels are used and the arithmetic is here, over a part of the parameter at a time, so that float32
copies of a part are all the memory it takes.
"""

from typing import Any

import torch

from memfit.core.errors import BadOptimizer
from memfit.frameworks.torch.apply import bitsandbytes_kernels as kernels
from memfit.frameworks.torch.apply.single_updates import OptionGroups, counts_on_device
from memfit.frameworks.torch.apply.tensor_memory import dense, simulated
from memfit.frameworks.torch.shapes.shapes import HALVES

MOMENTS = ("exp_avg", "exp_avg_sq")
SMALLEST = 4096
"""Parameters of fewer elements keep float32 moments, as in bitsandbytes: they are small, and often sensitive."""
PART = 1 << 18
# The kernel counts elements in 32 bits.
_CUDA_PART = 1 << 30
_CUDA_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SCALES = "_scales"


class EightBitUpdates:
    """Updates parameters as Adam and AdamW do, with moments that become 8-bit parameter by parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            raise BadOptimizer(
                f"8-bit optimizer states are there for torch.optim.Adam and torch.optim.AdamW, but "
                f"{type(optimizer).__name__} was given. Use one of the two, or leave this move out."
            )
        if any(group.get("amsgrad") for group in optimizer.param_groups):
            raise BadOptimizer("8-bit optimizer states have no amsgrad. Set amsgrad=False, or leave this move out.")
        kernels.load()
        self._optimizer = optimizer
        self._groups = OptionGroups(optimizer)
        self._tables: dict[tuple[bool, torch.device], torch.Tensor] = {}
        for parameter, state in optimizer.state.items():
            self._shrink(parameter, state)

    @torch.no_grad()
    def update(self, parameter: torch.nn.Parameter) -> None:
        """Updates `parameter` from its gradient."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise BadOptimizer(
                f"8-bit optimizer states can't take the sparse gradient of a parameter of shape "
                f"{tuple(parameter.shape)}. Make its layer with sparse=False, or leave this move out."
            )
        group = self._groups.of(parameter)
        state = self._optimizer.state[parameter]
        if not state:
            self._start(parameter, state)
        self._shrink(parameter, state)
        state["step"] = int(state["step"]) + 1
        if group.get("maximize"):
            gradient = -gradient
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        if group["weight_decay"] and not _decoupled(self._optimizer, group):
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        self._apply(parameter, gradient, state, _Options(self._optimizer, group, state["step"]))

    def close(self) -> None:
        """Makes the moments what the optimizer itself has."""
        for parameter, state in self._optimizer.state.items():
            if simulated(parameter):
                # There are no values to bring back, and nobody asks for the memory that it would take.
                continue
            for name in MOMENTS:
                scales = state.pop(name + _SCALES, None)
                if scales is not None:
                    values = kernels.dequantize_8bit(_flat(state[name]), scales, self._table(name, parameter))
                    state[name] = _flat_like(parameter, values.to(parameter.dtype))
                elif name in state:
                    state[name] = state[name].to(parameter.dtype)
            if "step" in state:
                device = parameter.device if counts_on_device(self._groups.of(parameter)) else "cpu"
                state["step"] = torch.tensor(float(state["step"]), dtype=torch.float32, device=device)
        self._tables.clear()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Takes over a state that was saved with or without this move."""
        # PyTorch would make the codes floating-point numbers.
        self._optimizer.load_state_dict({**saved, "state": {}})
        ours = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        theirs = (number for group in saved["param_groups"] for number in group["params"])
        for parameter, number in zip(ours, theirs, strict=True):
            if number in saved["state"]:
                self._optimizer.state[parameter] = {
                    name: value.detach().to(parameter.device, copy=True)
                    if isinstance(value, torch.Tensor) and value.dim()
                    else value
                    for name, value in saved["state"][number].items()
                }

    def _start(self, parameter: torch.nn.Parameter, state: dict[str, Any]) -> None:
        state["step"] = 0
        for name in MOMENTS:
            if not _shrinks(parameter):
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)
                continue
            state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
            # The code of zero differs, but a block whose largest magnitude is 0 is zero throughout.
            blocks = -(-parameter.numel() // kernels.BLOCK_8BIT)
            state[name + _SCALES] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)

    def _shrink(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Makes moments 8-bit that aren't."""
        for name in MOMENTS:
            values = state.get(name)
            if values is None or values.dtype is torch.uint8:
                continue
            if not _shrinks(parameter):
                state[name] = values.float()
                continue
            if values.stride() != parameter.stride():
                values = torch.empty_like(parameter, dtype=values.dtype).copy_(values)
            codes, scales = kernels.quantize_8bit(_flat(values).float(), self._table(name, parameter))
            state[name] = _flat_like(parameter, codes)
            state[name + _SCALES] = scales

    def _apply(
        self, parameter: torch.nn.Parameter, gradient: torch.Tensor, state: dict[str, Any], options: "_Options"
    ) -> None:
        values, gradient = _flat(parameter.detach()), _flat(gradient)
        moments = [_flat(state[name]) for name in MOMENTS]
        if moments[0].dtype is not torch.uint8:
            options.update(values, gradient, moments[0], moments[1])
            return
        scales = [state[name + _SCALES] for name in MOMENTS]
        tables = [self._table(name, parameter) for name in MOMENTS]
        by_kernel = parameter.device.type == "cuda" and parameter.dtype in _CUDA_DTYPES
        part = _CUDA_PART if by_kernel else PART
        for start in range(0, values.numel(), part):
            here = slice(start, start + part)
            blocks = slice(start // kernels.BLOCK_8BIT, (start + part) // kernels.BLOCK_8BIT)
            codes, largest = [moment[here] for moment in moments], [scale[blocks] for scale in scales]
            if by_kernel:
                options.update_by_kernel(values[here], gradient[here], codes, largest, tables)
                continue
            floats = [*map(kernels.dequantize_8bit, codes, largest, tables)]
            options.update(values[here], gradient[here], *floats)
            for moment, own, own_scales, numbers in zip(floats, codes, largest, tables, strict=True):
                new_codes, new_scales = kernels.quantize_8bit(moment, numbers)
                own.copy_(new_codes)
                own_scales.copy_(new_scales)

    def _table(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        key = (name == MOMENTS[0], parameter.device)
        if key not in self._tables:
            self._tables[key] = kernels.table(*key)
        return self._tables[key]


class _Options:
    """The numbers of one update."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], step: int) -> None:
        self.rate = float(group["lr"])
        self.betas = (float(group["betas"][0]), float(group["betas"][1]))
        self.epsilon = float(group["eps"])
        self.decay = float(group["weight_decay"]) if _decoupled(optimizer, group) else 0.0
        self.step = step

    def update(self, values: torch.Tensor, gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
        """Adam's update of `values` in place, and of both moments, which are float32."""
        beta_1, beta_2 = self.betas
        gradient = gradient.float()
        first.lerp_(gradient, 1 - beta_1)
        second.mul_(beta_2).addcmul_(gradient, gradient, value=1 - beta_2)
        denominator = second.sqrt().div_((1 - beta_2**self.step) ** 0.5).add_(self.epsilon)
        change = denominator.reciprocal_().mul_(first).mul_(self.rate / (1 - beta_1**self.step))
        # Rounded once, at the end.
        exact = values.float() if values.dtype in HALVES else values
        if self.decay:
            exact.mul_(1 - self.rate * self.decay)
        exact.sub_(change)
        if exact is not values:
            values.copy_(exact)

    def update_by_kernel(
        self, values: torch.Tensor, gradient: torch.Tensor, codes: list[Any], scales: list[Any], tables: list[Any]
    ) -> None:
        """The same with moments of 8 bits, without temporaries."""
        numbers = (*self.betas, 0.0, 0.0, self.epsilon, self.step, self.rate)
        torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
            "adam", gradient.to(values.dtype), values, *codes, *numbers, *tables, *scales, self.decay, 1.0, False
        )


def _decoupled(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    return isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))


def _shrinks(parameter: torch.Tensor) -> bool:
    return parameter.numel() >= SMALLEST and dense(parameter)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a dense tensor in the order of memory, whatever its layout; another tensor as it is."""
    return tensor.as_strided((tensor.numel(),), (1,)) if dense(tensor) else tensor


def _flat_like(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return values.as_strided(parameter.shape, parameter.stride())

"""What the user's code sees: tensors that look as if they were on the simulated device.

Shape-only tensors live on PyTorch's meta device. A function mode answers questions about the device (`x.device`,
`x.is_cuda`) as the target would and turns requests for it (`x.to("cuda")`, `torch.zeros(3, device="cuda")`) into
requests for shapes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from memfit.adapters.torch import fallbacks
from memfit.adapters.torch.shapes import META

# Factories whose first argument is a size.
_SIZED = frozenset({torch.zeros, torch.ones, torch.empty})
_Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


KEPT_ON_DEVICE = "kept-on-device"


class Look(TorchFunctionMode):
    """Shows shape-only tensors as tensors of the target device.

    Args:
        device_type: "cuda" or "cpu".
        report: takes (code, text) of each assumption made.
    """

    def __init__(self, device_type: str, report: Callable[[str, str], None] = lambda code, text: None) -> None:
        super().__init__()
        self._report = report
        self._has_gpu = torch.cuda.is_available()
        self._shown = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
        self._type = device_type
        self._scalars_stay = False
        tensor: Any = torch.Tensor
        self._handlers: dict[Any, _Handler] = {
            tensor.device.__get__: self._device,
            tensor.is_cuda.__get__: self._is_cuda,
            tensor.is_cpu.__get__: self._is_cpu,
            tensor.is_meta.__get__: self._is_meta,
            tensor.get_device: self._index,
            torch.get_device: self._index,
            tensor.to: self._to,
            tensor.cuda: self._cuda,
            tensor.cpu: self._cpu,
            tensor.pin_memory: self._same,
            tensor.is_pinned: lambda func, args, kwargs: False,
            tensor.record_stream: lambda func, args, kwargs: None,
            tensor.__format__: self._format,
            tensor.new: self._new,
            tensor.isfinite: self._is_finite,
            torch.isfinite: self._is_finite,
            tensor.new_tensor: self._new_tensor,
            torch.tensor: self._from_data,
            torch.as_tensor: self._from_data,
        }
        if device_type == "cpu":
            self._handlers |= {tensor.numpy: self._from_host_copy, tensor.__array__: self._from_host_copy}
        # On the host every tensor the step makes belongs to the simulated device.
        self._constructors = frozenset(_device_constructors()) if device_type == "cpu" else frozenset()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        if self._scalars_stay and func in _SIZED and args and args[0] in ((), []):
            return func(*args, **kwargs)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self.real(kwargs["device"])}
        if kwargs.get("device") is None and func in self._constructors:
            kwargs = {**kwargs, "device": META}
        return func(*args, **kwargs)

    @contextmanager
    def keeping_scalars(self) -> Iterator[None]:
        """On the host, single numbers made while this lasts keep their values: optimizers compute with counters."""
        self._scalars_stay = self._type == "cpu"
        try:
            yield
        finally:
            self._scalars_stay = False

    def real(self, device: Any) -> Any:
        """Where tensors for `device` really go."""
        if device is None or isinstance(device, torch.dtype):
            return device
        if isinstance(device, int):
            return META
        return META if torch.device(device).type == self._type else device

    def _device(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = func(*args)
        return self._shown if device.type == "meta" else device

    def _simulated(self, args: tuple[Any, ...]) -> bool:
        return bool(torch.Tensor.is_meta.__get__(args[0]))  # type: ignore[attr-defined]

    def _is_cuda(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self._type == "cuda" if self._simulated(args) else bool(func(*args))

    def _is_cpu(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self._type == "cpu" if self._simulated(args) else bool(func(*args))

    def _is_meta(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return False

    def _index(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if self._simulated(args):
            return 0 if self._type == "cuda" else -1
        return int(func(*args))

    def _to(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) > 1 and isinstance(args[1], str | torch.device | int):
            args = (args[0], self._destination(args, args[1]), *args[2:])
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self._destination(args, kwargs["device"])}
        return func(*args, **kwargs)

    def _destination(self, args: tuple[Any, ...], device: Any) -> Any:
        """Where `.to(device)` sends a tensor.

        `"cuda" if torch.cuda.is_available() else "cpu"` gives "cpu" on a machine without a GPU, and would on the target
        have given "cuda": there a simulated tensor stays where it is. `.cpu()` still means the host.
        """
        real = self.real(device)
        if real is None or self._type == "cpu" or self._has_gpu or not self._simulated(args):
            return real
        if torch.device(real).type == "cpu":
            self._report(KEPT_ON_DEVICE, '.to("cpu") on a machine without a GPU was taken to mean the simulated device')
            return META
        return real

    def _cuda(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0].to(self.real("cuda"))

    def _cpu(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0] if self._type == "cpu" and self._simulated(args) else func(*args, **kwargs)

    def _from_data(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A tensor from Python data is made on the host and copied over, which PyTorch's meta device doesn't show."""
        data = args[0] if args else kwargs.get("data")
        device = self.real(kwargs.get("device"))
        if self._scalars_stay and isinstance(data, int | float):
            return func(*args, **kwargs)
        if device is None and self._type == "cpu":
            device = META
        if device != META or isinstance(data, torch.Tensor):
            return func(*args, **(kwargs if kwargs.get("device") is None else {**kwargs, "device": device}))
        options = {name: value for name, value in kwargs.items() if name not in ("device", "requires_grad")}
        return func(*args, **options).to(META).requires_grad_(kwargs.get("requires_grad", False))

    def _new_tensor(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._simulated(args):
            return func(*args, **kwargs)
        given = {"dtype": args[0].dtype, "device": META, **kwargs}
        return self._from_data(torch.tensor, args[1:], {name: v for name, v in given.items() if v is not None})

    def _new(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The way in which optimizers make sparse tensors, which PyTorch lacks on its meta device."""
        if self._simulated(args) and args[0].layout is torch.sparse_coo:
            return torch.sparse_coo_tensor(*args[1:], check_invariants=False)
        return func(*args, **kwargs)

    def _is_finite(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fallbacks.read_as_true(func(*args, **kwargs))

    def _format(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """`f"{loss:.3f}"` reads a value, which PyTorch refuses on its meta device."""
        return format(args[0].item(), args[1]) if self._simulated(args) and args[0].dim() == 0 else str(func(*args))

    def _from_host_copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(args[0].to("cpu") if self._simulated(args) else args[0], *args[1:], **kwargs)

    def _same(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0]

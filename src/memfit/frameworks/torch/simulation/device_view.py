"""What the user's code sees: tensors that look as if they were on the simulated device.

Shape-only tensors live on PyTorch's meta device. A function mode answers questions about the device (`x.device`,
`x.is_cuda`) as the target would and turns requests for it (`x.to("cuda")`, `torch.zeros(3, device="cuda")`) into
requests for shapes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memfit.frameworks.torch import internals
from memfit.frameworks.torch.cuda.random import SimulatedGenerator
from memfit.frameworks.torch.kernels import fallbacks
from memfit.frameworks.torch.shapes.device_labels import BARE, DeviceLabels
from memfit.frameworks.torch.shapes.shapes import META, Arguments, Options, shape_like
from memfit.frameworks.torch.shapes.tensor_types import cuda_type_name, dtype_of_type
from memfit.frameworks.torch.simulation.higher_order import HigherOrder

# Factories whose first argument is a size.
_SIZED = frozenset({torch.zeros, torch.ones, torch.empty})
_Handler = Callable[[Any, Arguments, Options], Any]
KEPT_ON_DEVICE = "kept-on-device"


class DeviceView(TorchFunctionMode):
    """Shows shape-only tensors as tensors of the device of `labels`, where they are.

    Code that knows the device has been told that it is there, and by "cpu" means the host. Otherwise it may have chosen
    "cpu" only because this machine has no GPU.
    """

    def __init__(self, labels: DeviceLabels, report: fallbacks.Report, *, knows_device: bool = False) -> None:
        super().__init__()
        self._labels = labels
        self._report = report
        self._cpu_means_host = knows_device or torch.cuda.is_available()
        self._host_as_shapes = False
        self._type = labels.device.type
        self._scalars_stay = False
        self.default_device: torch.device | None = None
        self.default_type_is_cuda = False
        self.is_large_weight: Callable[[Arguments, Options], bool] = lambda args, kwargs: False
        """Whether `torch.empty(*args, **kwargs)` makes a weight that the host need not hold."""
        self.check_index: Callable[[int], None] = lambda index: None
        """Called with the index of each device that is named; raises where there is no such device."""
        self.on_parameter: Callable[[torch.Tensor], None] = lambda parameter: None
        """Called when a module has moved a parameter to the simulated device."""
        self.on_arrival: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
        """Called with each tensor of the host that is copied to the device; gives what is copied in its place."""
        self.on_departure: Callable[[torch.Tensor, torch.Tensor], None] = lambda tensor, before: None
        """Called when a parameter has left the host, with what it was there."""
        self._all_constructors = frozenset(internals.device_constructors())
        # On the host every tensor the step makes belongs to the simulated device.
        self._constructors = self._all_constructors if self._type == "cpu" else frozenset()
        tensor: Any = torch.Tensor
        to_array = self._from_host_copy if self._type == "cpu" else self._no_array
        self.higher_order = HigherOrder(self.again, report)
        self._handlers: dict[Any, _Handler] = {
            **self.higher_order.handlers(),
            tensor.numpy: to_array,
            tensor.__array__: to_array,
            tensor.device.__get__: self._device,
            tensor.is_cuda.__get__: lambda func, args, kwargs: (
                self._type == "cuda" if self._simulated(args[0]) else bool(func(*args))
            ),
            tensor.is_cpu.__get__: lambda func, args, kwargs: (
                self._labels.of(args[0]).type == "cpu" if self._shape_only(args[0]) else bool(func(*args))
            ),
            tensor.is_meta.__get__: lambda func, args, kwargs: (
                self._shape_only(args[0]) and self._labels.of(args[0]) == BARE
            ),
            tensor.data.__set__: self._set_data,
            tensor.get_device: self._index,
            torch.get_device: self._index,
            tensor.to: self._to,
            tensor.cuda: self._cuda,
            tensor.cpu: self._cpu,
            tensor.type: self._cast_by_name,
            internals.parse_to: self._parse_to,
            tensor.pin_memory: lambda func, args, kwargs: args[0],
            tensor.share_memory_: lambda func, args, kwargs: (
                args[0] if self._simulated(args[0]) else func(*args, **kwargs)
            ),
            tensor.is_pinned: lambda func, args, kwargs: False,
            tensor.record_stream: lambda func, args, kwargs: None,
            tensor.__format__: self._format,
            tensor.__repr__: self._describe,
            tensor.tolist: self._from_host_copy,
            tensor.new: self._new,
            tensor.isfinite: self._is_finite,
            torch.isfinite: self._is_finite,
            tensor.new_tensor: self._new_tensor,
            torch.tensor: self._from_data,
            torch.as_tensor: self._from_data,
            torch.asarray: self._from_data,
            torch.device: self._named_device,
            torch.empty: self._empty,
            tensor.__getitem__: self._index_by_lists,
            tensor.__setitem__: self._index_by_lists,
        }

    def __torch_function__(self, func: Any, types: Any, args: Arguments = (), kwargs: Options | None = None) -> Any:
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(func, args, kwargs or {})
        if not kwargs and not self._scalars_stay and func not in self._all_constructors:
            # Most calls read an attribute.
            return func(*args)
        return self._plain(func, args, kwargs or {})

    def _plain(self, func: Any, args: Arguments, kwargs: Options) -> Any:
        """Calls `func` with devices named as they really are."""
        if self._scalars_stay and func in _SIZED and args and args[0] in ((), []):
            return func(*args, **kwargs)
        if isinstance(kwargs.get("generator"), SimulatedGenerator):
            kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        if kwargs.get("pin_memory"):
            # PyTorch asks the accelerator's library for pinned memory.
            return self._plain(func, args, {**kwargs, "pin_memory": False}).pin_memory()
        device = kwargs.get("device")
        if device is None and func in self._constructors:
            return func(*args, **{**kwargs, "device": META})
        if device is None and func in self._all_constructors:
            device = self.default_device
        return func(*args, **kwargs) if device is None else self._call_for(device, func, args, kwargs)

    def know_host(self) -> None:
        """From now on "cpu" means the host, and what goes there stays of shapes only: shards may be large."""
        self._cpu_means_host = self._host_as_shapes = True

    @contextmanager
    def keeping_scalars(self) -> Iterator[None]:
        """On the host, single numbers made while this lasts keep their values: optimizers compute with counters."""
        self._scalars_stay = self._type == "cpu"
        try:
            yield
        finally:
            self._scalars_stay = False

    @contextmanager
    def again(self) -> Iterator[None]:
        """On again for code of the user's that a function of PyTorch calls: modes are off inside of those."""
        with internals.enable_torch_function():
            is_on = any(mode is self for mode in internals.function_mode_stack())
            with nullcontext() if is_on else self:
                yield

    def put(self, tensor: torch.Tensor, device: Any) -> torch.Tensor:
        """`tensor`, a real one or one of shapes only, as a new tensor on `device`."""
        with internals.disable_torch_function():
            place = self.place(device) or self._labels.device
            with self._labels.requesting(place):
                return shape_like(tensor) if tensor.is_meta else tensor.to(META)

    def place(self, device: Any) -> torch.device | None:
        """The place that shape-only tensors for `device` have; None when real tensors go there."""
        named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if named.type == "meta":
            return BARE
        if named.type != self._type:
            return None
        if named.index is None:
            return self._labels.device
        self.check_index(named.index)
        return named

    def _empty(self, func: Any, args: Arguments, kwargs: Options) -> Any:
        """`torch.empty` on the host: of shapes only where that is a large model's weight."""
        device = kwargs.get("device", self.default_device)
        on_host = device is None or (not isinstance(device, int) and torch.device(device).type == "cpu")
        if on_host and self.is_large_weight(args, kwargs):
            return self._at(torch.device("cpu"), func, *args, **kwargs)
        return self._plain(func, args, kwargs)

    def _call_for(self, device: Any, func: Any, args: Arguments, kwargs: Options) -> Any:
        """Calls `func` so that what it makes is on `device`."""
        place = self.place(device)
        if place is None:
            return func(*args, **{**kwargs, "device": device})
        return self._at(place, func, *args, **kwargs)

    def _at(self, place: torch.device, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls `func` so that it makes a shape-only tensor at `place`."""
        with self._labels.requesting(place):
            return func(*args, **{**kwargs, "device": META})

    def _named_device(self, func: Any, args: Arguments, kwargs: Options) -> Any:
        """`torch.device(0)` is a device of the accelerator, of which a build without CUDA knows none."""
        if len(args) == 1 and type(args[0]) is int and self._type == "cuda":
            return torch.device("cuda", args[0])
        return func(*args, **kwargs)

    def _device(self, func: Any, args: Arguments, kwargs: Options) -> Any:
        device = func(*args)
        return self._labels.of(args[0]) if device.type == "meta" else device

    def _shape_only(self, tensor: Any) -> bool:
        return bool(torch.Tensor.is_meta.__get__(tensor))  # type: ignore[attr-defined]

    def _simulated(self, tensor: Any) -> bool:
        return self._shape_only(tensor) and self._labels.of(tensor).type == self._type

    def _index(self, func: Any, args: Arguments, kwargs: Options) -> int:
        if self._simulated(args[0]):
            return (self._labels.of(args[0]).index or 0) if self._type == "cuda" else -1
        return int(func(*args))

    def _to(self, func: Any, args: Arguments, kwargs: Options) -> Any:
        tensor, rest = args[0], args[1:]
        device: Any = kwargs.get("device")
        if rest and (isinstance(rest[0], str | torch.device) or type(rest[0]) is int):
            device, rest = rest[0], rest[1:]
        elif rest and rest[0] is None:
            rest = rest[1:]
        elif rest and isinstance(rest[0], torch.Tensor):
            other, rest = rest[0], rest[1:]
            device = self._labels.of(other) if self._shape_only(other) else other.device
            kwargs = {"dtype": other.dtype, **kwargs}
        if rest and isinstance(rest[0], torch.dtype):
            kwargs, rest = {**kwargs, "dtype": rest[0]}, rest[1:]
        for name, value in zip(("non_blocking", "copy"), rest, strict=False):
            kwargs = {**kwargs, name: value}
        kwargs = {name: value for name, value in kwargs.items() if name != "device" and value is not None}
        return func(tensor, **kwargs) if device is None else self._move(tensor, device, func, kwargs)

    def _move(self, tensor: Any, device: Any, func: Any, kwargs: dict[str, Any]) -> Any:
        place = self.place(device)
        if place is None:
            if self._guessed_host(tensor, device):
                place = self._labels.device
            elif self._host_as_shapes and self._simulated(tensor) and torch.device(device).type == "cpu":
                place = torch.device("cpu")
            elif self._on_host_as_shape(tensor):
                return func(tensor, **kwargs)
            else:
                return func(tensor, device=device, **kwargs)
        if not self._shape_only(tensor):
            return self._at(place, func, self.on_arrival(tensor), **kwargs)
        here = self._labels.of(tensor)
        if here == place:
            return func(tensor, **kwargs)
        return _carry(tensor, here, place, kwargs.get("dtype") or tensor.dtype, self._labels)

    def _on_host_as_shape(self, tensor: Any) -> bool:
        return self._type != "cpu" and self._shape_only(tensor) and self._labels.of(tensor).type == "cpu"

    def _guessed_host(self, tensor: Any, device: Any) -> bool:
        """Whether `.to(device)` names the host only because this machine has no GPU.

        `"cuda" if torch.cuda.is_available() else "cpu"` gives "cpu" there, and would on the target have given "cuda".
        `.cpu()` still means the host.
        """
        may_be_guessed = self._type != "cpu" and not self._cpu_means_host and self._shape_only(tensor)
        if not may_be_guessed or torch.device(device).type != "cpu":
            return False
        self._report(KEPT_ON_DEVICE, '.to("cpu") on a machine without a GPU was taken to mean the simulated device')
        return True

    def _cuda(self, func: Any, args: Arguments, kwargs: Options) -> Any:
        given = args[1] if len(args) > 1 else kwargs.get("device")
        return self._move(args[0], "cuda" if given is None else given, torch.Tensor.to, {})

    def _cpu(self, func: Any, args: Arguments, kwargs: Options) -> Any:
        if self._host_as_shapes and self._type != "cpu" and self._simulated(args[0]):
            return self._move(args[0], "cpu", torch.Tensor.to, {})
        stays = self._on_host_as_shape(args[0]) or (self._type == "cpu" and self._simulated(args[0]))
        return args[0] if stays else func(*args, **kwargs)

    def _cast_by_name(self, func: Any, args: Arguments, kwargs: Options) -> Any:
        """`x.type()` and `x.type(torch.cuda.FloatTensor)`, which names a device as well as a dtype."""
        wanted = args[1] if len(args) > 1 else kwargs.get("dtype")
        if wanted is None:
            simulated = self._type == "cuda" and self._simulated(args[0])
            return cuda_type_name(args[0].dtype) if simulated else func(*args)
        if isinstance(wanted, torch.dtype):
            return func(args[0], wanted)
        device, dtype = dtype_of_type(wanted)
        return self._move(args[0], device, torch.Tensor.to, {"dtype": dtype})

    def _parse_to(self, func: Any, args: Arguments, kwargs: Options) -> Any:
        """The arguments of `module.to`: they are only read here, so devices stay as they are named."""
        if args and type(args[0]) is int:
            args = (torch.device("cuda", args[0]), *args[1:])
        if type(kwargs.get("device")) is int:
            kwargs = {**kwargs, "device": torch.device("cuda", kwargs["device"])}
        given = args[0] if args else kwargs.get("tensor", kwargs.get("other"))
        device, *rest = func(*args, **kwargs)
        if isinstance(given, torch.Tensor) and self._simulated(given):
            device = self._labels.of(given)
        return device, *rest

    def _set_data(self, func: Any, args: Arguments, kwargs: Options) -> None:
        """`parameter.data = moved`: how modules change their device while the parameter stays the same object."""
        target, value = args
        if self._shape_only(target) == self._shape_only(value):
            arrives = self._on_host_as_shape(target) and self._simulated(value)
            func(*args)
            if arrives:
                self.on_parameter(target)
            return
        shell = value.detach()
        if target.grad is not None:
            with self._labels.requesting(self._labels.of(value) if self._shape_only(value) else None):
                grad = torch.empty_like(target.grad, device=value.device)
            # A gradient may have another size than its parameter, as a shard has, but can't be given to it then.
            shell = torch.empty_like(grad, device=value.device)
            shell.grad = grad
            shell.data = value
        shell.requires_grad_(target.requires_grad)
        internals.swap_tensors(target, shell)
        if self._simulated(target):
            self.on_departure(target, shell)
            self.on_parameter(target)

    def _from_data(self, func: Any, args: Arguments, kwargs: Options) -> Any:
        """A tensor from Python data is made on the host and copied over, which PyTorch's meta device doesn't show."""
        data: Any = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        device = kwargs.get("device")
        if self._scalars_stay and isinstance(data, int | float):
            return func(*args, **kwargs)
        if device is None:
            device = self.default_device if self._type == "cuda" else self._labels.device
        if kwargs.get("pin_memory"):
            return self._from_data(func, args, {**kwargs, "pin_memory": False}).pin_memory()
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        is_tensor = isinstance(data, torch.Tensor)
        if device is None or (self.place(device) is None and not (is_tensor and self._shape_only(data))):
            given = {} if device is None or is_tensor else {"device": device}
            return func(*(args if is_tensor else _on_host(args)), **kwargs, **given)
        grad = kwargs.pop("requires_grad", False)
        if not is_tensor:
            return self._move(func(*_on_host(args), **kwargs), device, torch.Tensor.to, {}).requires_grad_(grad)
        options = {} if kwargs.get("dtype") is None else {"dtype": kwargs["dtype"]}
        if func is torch.tensor:
            return self._move(data.detach(), device, torch.Tensor.to, {**options, "copy": True}).requires_grad_(grad)
        return self._move(data, device, torch.Tensor.to, options)

    def _new_tensor(self, func: Any, args: Arguments, kwargs: Options) -> Any:
        if not self._simulated(args[0]):
            return func(*args, **kwargs)
        given = {"dtype": args[0].dtype, "device": self._labels.of(args[0]), **kwargs}
        return self._from_data(torch.tensor, args[1:], {name: v for name, v in given.items() if v is not None})

    def _new(self, func: Any, args: Arguments, kwargs: Options) -> Any:
        """The way in which optimizers make sparse tensors, which PyTorch lacks on its meta device."""
        if not self._simulated(args[0]):
            return func(*args, **kwargs)
        if args[0].layout is torch.sparse_coo:
            return torch.sparse_coo_tensor(*args[1:], check_invariants=False)
        if args[1:] and all(type(size) is int for size in args[1:]):
            return args[0].new_empty(args[1:])
        if len(args) == 2 and isinstance(args[1], torch.Size):
            return args[0].new_empty(args[1])
        return self._new_tensor(func, args, kwargs) if args[1:] else args[0].new_empty(0)

    def _is_finite(self, func: Any, args: Arguments, kwargs: Options) -> Any:
        made = func(*args, **kwargs)
        return fallbacks.read_as_true(made) if self._shape_only(made) else made

    def _format(self, func: Any, args: Arguments, kwargs: Options) -> str:
        """`f"{loss:.3f}"` reads a value, which PyTorch refuses on its meta device."""
        if not self._shown(args[0]):
            return str(func(*args))
        return self._describe(func, args[:1], {}) if args[0].dim() else format(args[0].item(), args[1])

    def _shown(self, tensor: Any) -> bool:
        """Whether a tensor has no values of its own to be printed."""
        return self._simulated(tensor) or self._on_host_as_shape(tensor)

    def _describe(self, func: Any, args: Arguments, kwargs: Options) -> str:
        tensor = args[0]
        if not self._shown(tensor):
            return str(func(*args, **kwargs))
        values = str(tensor.item()) if tensor.dim() == 0 else "..."
        parts = [values, f"device='{self._labels.of(tensor)}'"]
        if tensor.dim():
            parts.append(f"size={tuple(tensor.shape)}")
        if tensor.dtype not in (torch.float32, torch.int64, torch.bool):
            parts.append(f"dtype={tensor.dtype}")
        if tensor.grad_fn is not None:
            parts.append(f"grad_fn=<{type(tensor.grad_fn).__name__}>")
        elif tensor.requires_grad:
            parts.append("requires_grad=True")
        return f"tensor({', '.join(parts)})"

    def _from_host_copy(self, func: Any, args: Arguments, kwargs: Options) -> Any:
        tensor = args[0]
        if self._on_host_as_shape(tensor):
            tensor = fallbacks.host_zeros(tensor.shape, tensor.dtype)
        elif self._simulated(args[0]):
            tensor = tensor.detach().to("cpu")
        return func(tensor, *args[1:], **kwargs)

    def _no_array(self, func: Any, args: Arguments, kwargs: Options) -> Any:
        if self._on_host_as_shape(args[0]):
            return self._from_host_copy(func, args, kwargs)
        if self._simulated(args[0]):
            raise TypeError(
                f"can't convert {self._labels.of(args[0])} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return func(*args, **kwargs)

    def _index_by_lists(self, func: Any, args: Arguments, kwargs: Options) -> Any:
        """`x[[0, 2]]`: the list becomes a tensor on the host, where its values are known."""
        index = args[1]
        if index.__class__ is list:
            index = torch.tensor(index) if index and not isinstance(index[0], slice | torch.Tensor) else index
        elif index.__class__ is tuple and any(part.__class__ is list and part for part in index):
            index = tuple(torch.tensor(_on_host(p)) if p.__class__ is list and p else p for p in index)
        return func(args[0], index, *args[2:])


class _Carried(torch.autograd.Function):
    """A copy from one place to another, whose gradient goes the way back: to autograd both are the same device."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        here: torch.device,
        there: torch.device,
        dtype: torch.dtype,
        labels: DeviceLabels,
    ) -> torch.Tensor:
        ctx.way_back = (there, here, tensor.dtype, labels)
        with labels.requesting(there):
            return tensor.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _carry(gradients[0], *ctx.way_back), None, None, None, None


_carry: Callable[..., torch.Tensor] = _Carried.apply


def _on_host(value: Any) -> Any:
    """`torch.tensor([loss, 2.0])`: shape-only numbers among Python data as the numbers that stand in for them."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.is_meta and value.numel() == 1 else value
    if type(value) in (list, tuple) and any(isinstance(part, torch.Tensor | list | tuple) for part in value):
        return type(value)(_on_host(part) for part in value)
    return value

"""Simulated tensors in files: stored as shapes, and revived where they are loaded.

PyTorch pickles a tensor of its meta device as sizes and strides, which loses who shares a storage with whom and where
the tensor was shown. Here such a tensor is pickled like any other, as a view of a storage. In the storage's place
stands a token of a few bytes whose location says where the storage was and how large it is. `weights_only=True` can
read the file; outside of a simulation PyTorch refuses it, since it doesn't know the location.

On the way back each storage has a destination, as `map_location` wants it. What goes to the simulated device passes
`place`, one storage once; shapes that are wanted on the host become zeros.
"""

import functools
import math
import mmap
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import warn_if_has_hooks

from memfit.core.patching import Replacement, around
from memfit.core.units import MIB
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.shapes.shapes import META

Place = Callable[[torch.Tensor, torch.device | None], torch.Tensor]
Storage = Any  # torch.UntypedStorage, which its stubs give no attributes

_TAG = "memfit-shape-only:"
_TOKEN_BYTES = 16
_SIMULATED = torch.device("cuda", 0)
# Otherwise Linux refuses more memory than the machine has, used or not. Python has the name since 3.13.
_UNRESERVED = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

# Attributes that storages are given: what stands for one in a file, what a stand-in says of it, where one is to go.
_TOKEN = "_memfit_token"
_LOCATION = "_memfit_location"
_WANTED = "_memfit_wanted"
_ARRIVAL = "_memfit_arrival"


def is_shape_only(tensor: Any) -> bool:
    """Whether this is a tensor without values, whatever it is shown as."""
    if not isinstance(tensor, torch.Tensor):
        return False
    with internals.disable_torch_function():
        return tensor.is_meta and tensor.layout is torch.strided and not _is_wrapper(tensor)


def as_shape(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape without values, of which no simulation knows."""
    return _shape(tensor.dtype, tuple(tensor.size()), tensor.stride())


class ShapeOnly:
    """Stores and revives simulated tensors.

    `place` moves a real host tensor to the simulated device, or revives a shape-only one there; `device_of` says where
    a shape-only tensor is: what the user's own code made on the meta device belongs there.
    """

    def __init__(
        self, place: Place, device_of: Callable[[torch.Tensor], torch.device] = lambda tensor: _SIMULATED
    ) -> None:
        self._place = place
        self._device_of = device_of
        self.num_stored = 0  # how many tensors have been stored without values

    def replacements(self) -> list[Replacement]:
        """What makes PyTorch's pickles hold shapes."""
        storage = torch.UntypedStorage
        rebuild_v3 = around(*internals.place("rebuild_tensor_v3"), _rebuild)
        # The unpickler for weights only has a table of the functions that it may call.
        unpickler, name = internals.place("allowed_globals")
        allowed = getattr(unpickler, name)
        path = f"{rebuild_v3.value.__module__}.{rebuild_v3.value.__name__}"
        table = functools.cache(lambda: {**allowed(), path: rebuild_v3.value})
        return [
            around(*internals.place("reduce_tensor"), self._reduce),
            around(storage, "cuda", _storage_cuda),
            around(storage, "to", _storage_to),
            around(torch.serialization, "location_tag", lambda plain, it: getattr(it, _LOCATION, None) or plain(it)),
            around(*internals.place("rebuild_tensor"), _rebuild),
            rebuild_v3,
            around(*internals.place("restore_location"), _restore_wrapper),
            Replacement(unpickler, name, table),
        ]

    def restoring(self, map_location: Any, *, keeps_shapes: bool = False) -> Callable[[Storage, str], Storage]:
        """A `map_location` for PyTorch's own torch.load that does what `map_location` says on the simulated device.

        With `keeps_shapes`, tensors that were stored as shapes come back as such, known to no simulation.
        """

        def restore(storage: Storage, location: str) -> Storage:
            num_bytes = None
            if location.startswith(_TAG):
                location, _, size = location.removeprefix(_TAG).rpartition(":")
                num_bytes = int(size)
            storage, wanted = _wanted(map_location, storage, location)
            if num_bytes is None and not wanted.startswith(("cuda", "meta")):
                return torch.serialization.default_restore_location(storage, wanted)
            # Of the old format only sizes are known until everything has been unpickled.
            is_filled = num_bytes is None and not getattr(storage, "_torch_load_uninitialized", False)
            deliver: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor  # noqa: E731 - as it is
            if num_bytes is None or not keeps_shapes:
                deliver = functools.partial(self.deliver, device=checked_device(wanted))
            size_bytes = storage.nbytes() if num_bytes is None else num_bytes
            setattr(storage, _ARRIVAL, _Arrival(storage if is_filled else None, size_bytes, deliver))
            return storage

        restore.map_location = map_location  # type: ignore[attr-defined]
        return restore

    def deliver(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The tensor, from a file or without values, on `device`."""
        if device.type == "cuda":
            return self._place(tensor, device)
        if device.type == "meta":
            size, stride = tuple(tensor.size()), tensor.stride()
            return torch.empty_strided(size, stride, dtype=tensor.dtype, device=META)
        return _zeros(tensor) if is_shape_only(tensor) else tensor

    def _reduce(self, plain: Callable[..., Any], tensor: Any, protocol: int) -> Any:
        with internals.disable_torch_function():
            device = self._device_of(tensor) if tensor.is_meta and tensor.layout is torch.strided else META
            if device.type != "meta":
                return self._reduce_shape(tensor, device)
        return plain(tensor, protocol)

    def _reduce_shape(self, tensor: Any, device: torch.device) -> Any:
        warn_if_has_hooks(tensor)
        if _is_wrapper(tensor):
            # What it wraps is among its attributes.
            view = tuple(tensor.size()), tensor.stride(), tensor.storage_offset(), tensor.layout
            arguments = (type(tensor), tensor.dtype, *view, device, tensor.requires_grad)
            return internals.rebuild_wrapper, arguments
        self.num_stored += 1
        storage = tensor.untyped_storage()
        token = getattr(storage, _TOKEN, None)
        if token is None:
            with _unseen():
                token = torch.zeros(_TOKEN_BYTES, dtype=torch.uint8).untyped_storage()
            setattr(storage, _TOKEN, token)
        setattr(token, _LOCATION, f"{_TAG}{device}:{storage.nbytes()}")
        hooks: OrderedDict[Any, Any] = OrderedDict()
        state = tensor.storage_offset(), tuple(tensor.size()), tensor.stride(), tensor.requires_grad, hooks
        if tensor.dtype in internals.new_dtypes():
            return getattr(*internals.place("rebuild_tensor_v3")), (token, *state, tensor.dtype)
        typed = torch.storage.TypedStorage(wrap_storage=token, dtype=tensor.dtype, _internal=True)
        return internals.rebuild_tensor_v2, (typed, *state)


@dataclass(eq=False)
class _Arrival:
    """A storage on the way from a file to where its tensors are wanted."""

    storage: Storage | None  # None where only its size is known
    size_bytes: int
    deliver: Callable[[torch.Tensor], torch.Tensor]
    arrived: Storage | None = None

    def view(self, dtype: torch.dtype, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        """The tensor at the destination; all of a storage share one there as well."""
        if self.arrived is None:
            is_whole = offset == 0 and math.prod(size) * dtype.itemsize == self.size_bytes
            is_whole = is_whole and _shape(dtype, size, stride).is_contiguous()
            layout = (dtype, size, stride) if is_whole else (torch.uint8, (self.size_bytes,), (1,))
            read = _shape(*layout) if self.storage is None else _view(self.storage, layout[0], 0, *layout[1:])
            tensor = self.deliver(read)
            self.arrived, self.storage = tensor.untyped_storage(), None
            if is_whole:
                return tensor
        return _view(self.arrived, dtype, offset, size, stride)


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether this tensor holds nothing but others, as DTensor does."""
    dispatch: Any = type(tensor).__torch_dispatch__
    return dispatch is not torch.Tensor.__torch_dispatch__


@contextmanager
def _unseen() -> Iterator[None]:
    """What is made here is no one's allocation."""
    with internals.disable_torch_function(), internals.disable_torch_dispatch():
        yield


def _shape(dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    with _unseen():
        return torch.empty_strided(size, stride, dtype=dtype, device=META)


def _view(
    storage: Storage, dtype: torch.dtype, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    with _unseen():
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


def _zeros(shape: torch.Tensor) -> torch.Tensor:
    """Zeros on the host that take memory only where they are written, whatever their size."""
    with _unseen():
        size_bytes = shape.untyped_storage().nbytes()
        if size_bytes < MIB:
            zeros = torch.zeros(size_bytes, dtype=torch.uint8)
        else:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNRESERVED
            zeros = torch.frombuffer(mmap.mmap(-1, size_bytes, flags=flags), dtype=torch.uint8)
        view = int(shape.storage_offset()), tuple(shape.size()), shape.stride()
        return _view(zeros.untyped_storage(), shape.dtype, *view)


def _wanted(map_location: Any, storage: Storage, location: str) -> tuple[Storage, str]:
    """The storage and where it is to go, by the rules of torch.load."""
    if isinstance(map_location, dict):
        map_location = map_location.get(location, location)
    if isinstance(map_location, bytes):
        map_location = map_location.decode()
    if map_location is None or isinstance(map_location, str | torch.device):
        return storage, location if map_location is None else str(map_location)
    wanted = map_location(storage, location)
    if wanted is None:
        return storage, location
    return wanted, str(getattr(wanted, _WANTED, wanted.device))


def checked_device(location: Any) -> torch.device:
    """The device of that name or number; raises PyTorch's own error for one that is not there."""
    device = torch.device(location)
    if device.type != "cuda":
        return device
    index = torch.cuda.current_device() if device.index is None else device.index
    count = torch.cuda.device_count()
    if index >= count:
        raise RuntimeError(
            f"Attempting to deserialize object on CUDA device {index} but torch.cuda.device_count() is {count}. "
            "Please use torch.load with map_location to map your storages to an existing device."
        )
    return torch.device("cuda", index)


def _rebuild(plain: Callable[..., Any], storage: Any, *view: Any) -> Any:
    """For `_rebuild_tensor`, and for `_rebuild_tensor_v3`, whose types of elements storages can't have."""
    arrival = getattr(storage._untyped_storage, _ARRIVAL, None)
    if arrival is None:
        return plain(storage, *view)
    offset, size, stride, *more = view
    tensor = arrival.view(more[2] if more else storage.dtype, offset, tuple(size), tuple(stride))
    return tensor.requires_grad_(more[0]) if more else tensor


def _restore_wrapper(plain: Callable[..., Any], device: Any) -> Any:
    """Where tensors go that only wrap others, of which a real one must never be on the simulated device."""
    wanted = getattr(internals.serialization_state.map_location, "map_location", device)
    if isinstance(wanted, dict):
        wanted = wanted.get(str(device), device)
    if wanted is not None and not isinstance(wanted, str | torch.device):
        return plain(device)
    wanted = torch.device(device if wanted is None else wanted)
    return META if wanted.type == "cuda" else wanted


def _storage_cuda(plain: Callable[..., Any], storage: Storage, device: Any = None, non_blocking: bool = False) -> Any:
    """`map_location=lambda storage, location: storage.cuda()`: says where the storage is wanted."""
    return storage.to(device=f"cuda:{device}" if isinstance(device, int) else device or "cuda")


def _storage_to(plain: Callable[..., Any], storage: Storage, *, device: Any, non_blocking: bool = False) -> Any:
    if torch.device(device).type != "cuda":
        return plain(storage, device=device, non_blocking=non_blocking)
    setattr(storage, _WANTED, device)
    return storage

"""safetensors files with simulated tensors, and real ones that are loaded to the simulated device.

The format has no place for tensors without values, so a file that holds any is written by torch.save, under the name
that the user's code gave it, and is told from others by its first bytes.

Other modules copy functions of safetensors when they are imported. So the functions replaced for writing are those that
the public ones look up when they run. Copies of the functions for reading have to be replaced one by one.
"""

import io
from collections.abc import Callable
from typing import Any

import torch

from memfit.adapters.torch.file_functions import FileFunctions
from memfit.adapters.torch.redirected_files import Path, RedirectedFiles
from memfit.adapters.torch.replacement import Replacement
from memfit.adapters.torch.shape_only import ShapeOnly, as_shape, checked_device, is_shape_only

_ARCHIVE = b"PK\x03\x04"
# A safetensors file begins with a size in 8 bytes that fits into the first 4.
_HEADER = 8
_FLATTENING = ("_flatten_as_ptr", "_flatten")  # the name changed between releases


class _Unflattened(dict[str, torch.Tensor]):
    """Tensors, some without values, on their way into a file."""


class SafetensorsFiles:
    """Stand-ins for functions of safetensors.

    Args:
        files: says which file is where.
        functions: knows for how long stand-ins are to act.
        shapes: stores and revives tensors without values.
    """

    def __init__(self, files: RedirectedFiles, functions: FileFunctions, shapes: ShapeOnly) -> None:
        self._files = files
        self._functions = functions
        self._shapes = shapes
        self._save = torch.save
        self._load = torch.load

    def replacements(self) -> tuple[list[Replacement], list[Replacement]]:
        """What to put in place, and what to put in place of each copy as well; nothing without safetensors."""
        try:
            import safetensors.torch
        except ImportError:
            return [], []
        module: Any = safetensors.torch
        inner = {name: self._flattening for name in _FLATTENING if hasattr(module, name)}
        inner |= {"serialize_file": self._serializing_to_file, "serialize": self._serializing}
        return (
            [
                Replacement(module, name, self._functions.stand_in(plain, other(plain)))
                for name, other in inner.items()
                for plain in [getattr(module, name)]
            ],
            [
                Replacement(safetensors, "safe_open", self._opening(safetensors.safe_open)),
                Replacement(module, "load", self._functions.stand_in(module.load, self._loading(module.load))),
            ],
        )

    def _flattening(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def flatten(tensors: Any, *args: Any) -> Any:
            has_shapes = isinstance(tensors, dict) and any(map(is_shape_only, tensors.values()))
            return _Unflattened(tensors) if has_shapes else plain(tensors, *args)

        return flatten

    def _serializing_to_file(self, plain: Callable[..., Any]) -> Callable[..., None]:
        def serialize(tensors: Any, filename: Path, metadata: dict[str, str] | None = None) -> None:
            target = self._files.target(filename)
            if isinstance(tensors, _Unflattened):
                self._store(tensors, metadata, target)
            else:
                plain(tensors, target, metadata=metadata)

        return serialize

    def _serializing(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def serialize(tensors: Any, metadata: dict[str, str] | None = None) -> Any:
            if not isinstance(tensors, _Unflattened):
                return plain(tensors, metadata=metadata)
            buffer = io.BytesIO()
            self._store(tensors, metadata, buffer)
            return buffer.getvalue()

        return serialize

    def _store(self, tensors: _Unflattened, metadata: dict[str, str] | None, target: Any) -> None:
        self._save({"tensors": dict(tensors), "metadata": metadata}, target)

    def _loading(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def load(data: bytes) -> Any:
            if not _is_archive(data):
                return plain(data)
            return _Delivered(self._stored(io.BytesIO(data)), self._to("cpu")).get_tensors()

        return load

    def _opening(self, plain: Callable[..., Any]) -> type:
        files = self

        class safe_open:
            """In the place of safetensors.safe_open, which is a class too."""

            def __new__(cls, filename: Path, framework: str, device: Any = "cpu", **options: Any) -> Any:
                if not files._functions.is_active:
                    return plain(filename, framework, device=device, **options)
                path = files._files.existing(filename)
                deliver = files._to(device)
                with open(path, "rb") as file:
                    if _is_archive(file.read(_HEADER)):
                        file.seek(0)
                        return _Delivered(files._stored(file), deliver)
                if deliver.device.type != "cuda":
                    return plain(path, framework, device=device, **options)
                return _Delivered(plain(path, framework, device="cpu", **options), deliver)

        return safe_open

    def _stored(self, source: Any) -> "_Stored":
        content = self._load(source, map_location=self._shapes.restoring(None, keeps_shapes=True), weights_only=True)
        return _Stored(content["tensors"], content["metadata"])

    def _to(self, device: Any) -> "_Deliver":
        return _Deliver(self._shapes, checked_device(f"cuda:{device}" if isinstance(device, int) else device))


class _Deliver:
    """Takes tensors to a device."""

    def __init__(self, shapes: ShapeOnly, device: torch.device) -> None:
        self._shapes = shapes
        self.device = device

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._shapes.deliver(tensor, self.device)


class _Stored:
    """A file that torch.save wrote, with the methods that an opened safetensors file has."""

    def __init__(self, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> None:
        self._tensors = tensors
        self._metadata = metadata

    def metadata(self) -> dict[str, str] | None:
        return self._metadata

    def keys(self) -> list[str]:
        return sorted(self._tensors)

    def offset_keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> torch.Tensor:
        return _fresh(self._tensors[name])

    def get_slice(self, name: str) -> "_StoredSlice":
        return _StoredSlice(self._tensors[name])


class _StoredSlice:
    """A tensor of such a file from which parts can be taken."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        import safetensors.torch

        return next(name for name, dtype in safetensors.torch._TYPES.items() if dtype is self._tensor.dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return _fresh(self._tensor[index].contiguous())


class _Delivered:
    """An opened file whose tensors are taken elsewhere when they are read."""

    def __init__(self, opened: Any, deliver: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._opened = opened
        self._deliver = deliver

    def __enter__(self) -> "_Delivered":
        return self

    def __exit__(self, *error: object) -> None:
        if hasattr(self._opened, "__exit__"):
            self._opened.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._deliver(self._opened.get_tensor(name))

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self._opened.keys()}  # noqa: SIM118

    def get_slice(self, name: str) -> "_DeliveredSlice":
        return _DeliveredSlice(self._opened.get_slice(name), self._deliver)


class _DeliveredSlice:
    def __init__(self, part: Any, deliver: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._part = part
        self._deliver = deliver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._deliver(self._part[index])


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return as_shape(tensor) if is_shape_only(tensor) else tensor


def _is_archive(data: bytes) -> bool:
    return data.startswith(_ARCHIVE) and data[len(_ARCHIVE) : _HEADER] != bytes(_HEADER - len(_ARCHIVE))

"""Checkpoints of safetensors and torch.distributed.checkpoint, whose formats have no place for tensors without values.

What holds such tensors is written by torch.save instead, as shapes, under the name that the user's code gave.

A safetensors file of that kind is told from others by its first bytes. Other modules copy functions of safetensors
when they are imported. So the functions replaced for writing are those that the public ones look up when they run;
copies of the functions for reading have to be replaced one by one.

PyTorch's distributed writer puts the parts of all ranks together and refuses when some are missing, and in a
simulation there is only one rank. So what that rank holds is saved in one file. Loading it leaves tensors as they are,
for they have no values anyway, and restores everything else. With one rank nothing of this is needed.
"""

import functools
import io
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from memfit.core.units import MIB
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.script.file_functions import FileFunctions, Plain
from memfit.frameworks.torch.script.redirected_files import Path, RedirectedFiles
from memfit.frameworks.torch.script.shape_only import ShapeOnly, as_shape, checked_device, is_shape_only
from memfit.frameworks.torch.shapes.patching import Replacement

_ARCHIVE = b"PK\x03\x04"
# A safetensors file begins with a size in 8 bytes that fits into the first 4.
_HEADER = 8
_FLATTENING = ("_flatten_as_ptr", "_flatten")  # the name changed between releases
# PyTorch's own name for what makes a folder a checkpoint.
_METADATA = ".metadata"


def without_zeros(value: Any) -> Any:
    """A large tensor of zeros, which a copy from the simulated device is, as a shape; anything else as it is.

    torch.distributed.checkpoint copies tensors to the host before it saves them.
    """
    plain = type(value) is torch.Tensor and not is_shape_only(value) and value.layout is torch.strided
    if not plain or value.nbytes < MIB:
        return value
    return value if value.contiguous().view(torch.uint8).any() else as_shape(value)


class _Unflattened(dict[str, torch.Tensor]):
    """Tensors, some without values, on their way into a file."""


class LibraryFiles:
    """Stand-ins for what saves and loads in these libraries."""

    def __init__(self, files: RedirectedFiles, functions: FileFunctions, shapes: ShapeOnly) -> None:
        self._files = files
        self._functions = functions
        self._shapes = shapes
        self._save: Callable[..., None] = torch.save
        self._load: Callable[..., Any] = torch.load

    def of_safetensors(self) -> tuple[list[Replacement], list[Replacement]]:
        """What to put in place, and what to put in place of each copy as well; nothing without safetensors."""
        try:
            import safetensors.torch
        except ImportError:
            return [], []
        module: Any = safetensors.torch
        inner: dict[str, Callable[..., Any]] = dict.fromkeys(
            (name for name in _FLATTENING if hasattr(module, name)), _flatten
        )
        inner |= {"serialize_file": self._serialize_file, "serialize": self._serialize}
        return (
            [self._replacement(module, name, other) for name, other in inner.items()],
            [
                Replacement(safetensors, "safe_open", self._opening(safetensors.safe_open)),
                self._replacement(module, "load", self._load_bytes),
            ],
        )

    def of_ranks(self) -> list[Replacement]:
        """What one of several ranks needs; imports torch.distributed.checkpoint, which takes a while."""
        if not torch.distributed.is_available():
            return []
        return [
            self._replacement(*internals.place("save_state_dict"), self._save_rank),
            self._replacement(*internals.place("load_state_dict"), self._load_rank),
        ]

    def _replacement(self, owner: Any, name: str, other: Callable[..., Any]) -> Replacement:
        plain = getattr(owner, name)
        return Replacement(owner, name, self._functions.stand_in(plain, functools.partial(other, plain)))

    def _serialize_file(
        self, plain: Plain, tensors: Any, filename: Path, metadata: dict[str, str] | None = None
    ) -> None:
        target = self._files.target(filename)
        if isinstance(tensors, _Unflattened):
            self._save({"tensors": dict(tensors), "metadata": metadata}, target)
        else:
            plain(tensors, target, metadata=metadata)

    def _serialize(self, plain: Plain, tensors: Any, metadata: dict[str, str] | None = None) -> Any:
        if not isinstance(tensors, _Unflattened):
            return plain(tensors, metadata=metadata)
        buffer = io.BytesIO()
        self._save({"tensors": dict(tensors), "metadata": metadata}, buffer)
        return buffer.getvalue()

    def _load_bytes(self, plain: Plain, data: bytes) -> Any:
        if not _is_archive(data):
            return plain(data)
        return _Delivered(self._stored(io.BytesIO(data)), self._to("cpu")).get_tensors()

    def _opening(self, plain: Plain) -> type:
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
                if deliver.keywords["device"].type != "cuda":
                    return plain(path, framework, device=device, **options)
                return _Delivered(plain(path, framework, device="cpu", **options), deliver)

        return safe_open

    def _stored(self, source: Any) -> "_Stored":
        return _Stored(**self._load(source, map_location=self._restoring(), weights_only=True))

    def _restoring(self) -> Any:
        return self._shapes.restoring(None, keeps_shapes=True)

    def _to(self, device: Any) -> "functools.partial[torch.Tensor]":
        device = checked_device(f"cuda:{device}" if isinstance(device, int) else device)
        return functools.partial(self._shapes.deliver, device=device)

    def _save_rank(self, plain: Plain, state_dict: Any, storage_writer: Any, *args: Any, **kwargs: Any) -> Any:
        path = getattr(storage_writer, "path", None)
        if path is None or not _is_shared():
            return plain(state_dict, storage_writer, *args, **kwargs)
        from torch.distributed.checkpoint.metadata import Metadata

        # Opened here: torch.save refuses a name that begins with its suffix.
        with open(self._files.target(os.path.join(path, _METADATA)), "wb") as file:
            self._save(internals.tree_map(without_zeros, state_dict), file)
        return Metadata(state_dict_metadata={})

    def _load_rank(self, plain: Plain, state_dict: Any, storage_reader: Any, *args: Any, **kwargs: Any) -> None:
        path = getattr(storage_reader, "path", None)
        if path is None or not _is_shared():
            plain(state_dict, storage_reader, *args, **kwargs)
            return
        saved = self._files.known(os.path.join(path, _METADATA))
        if saved not in self._files.redirected:
            # The user's own: read by one rank for itself.
            plain(state_dict, storage_reader, *args, **{**kwargs, "no_dist": True})
            return
        # Written above, by this run.
        place = self._files.redirected[str(saved)]
        _fill(state_dict, self._load(place, map_location=self._restoring(), weights_only=False))


def _is_shared() -> bool:
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def _fill(held: Any, content: dict[Any, Any]) -> None:
    for key, value in content.items():
        if isinstance(held.get(key), dict) and isinstance(value, dict):
            _fill(held[key], value)
        elif key in held and not isinstance(held[key], torch.Tensor):
            held[key] = value


def _flatten(plain: Plain, tensors: Any, *args: Any) -> Any:
    has_shapes = isinstance(tensors, dict) and any(map(is_shape_only, tensors.values()))
    return _Unflattened(tensors) if has_shapes else plain(tensors, *args)


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
    """An opened file, or a tensor of it, whose values are taken elsewhere when they are read."""

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

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._deliver(self._opened[index])

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._deliver(self._opened.get_tensor(name))

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self._opened.keys()}  # noqa: SIM118

    def get_slice(self, name: str) -> "_Delivered":
        return _Delivered(self._opened.get_slice(name), self._deliver)


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return as_shape(tensor) if is_shape_only(tensor) else tensor


def _is_archive(data: bytes) -> bool:
    return data.startswith(_ARCHIVE) and data[len(_ARCHIVE) : _HEADER] != bytes(_HEADER - len(_ARCHIVE))

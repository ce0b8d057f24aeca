"""Saving and loading during a dry run: the script goes on, and the user's files stay as they are.

Simulated tensors have no values, and what three steps have trained is nobody's best model. So what the script saves
(torch.save, safetensors, h5py, torch.distributed.checkpoint, files that it opens) goes to a folder of its own, as
shapes where there are no values, and is found there when it is loaded again. The user's own files can be loaded to the
simulated device; values are read on the host. Copies of functions, as transformers keeps of safetensors', are replaced.

safetensors and torch.distributed.checkpoint can't hold tensors without values: those are written by torch.save, under
the name that the script gave, and told from real safetensors files by their first bytes. PyTorch's distributed writer
wants the parts of all ranks, and a simulation has one: what that rank holds is saved in one file. Loading it leaves
tensors, which have no values anyway, as they are.
"""

import functools
import importlib
import importlib.util
import io
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from memfit.core.patching import Replacement, around
from memfit.core.redirected_files import AnyPath, Plain, RedirectedFiles, held_by_modules
from memfit.core.units import MIB
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.script.shape_only import Place, ShapeOnly, as_shape, checked_device, is_shape_only

OVERWRITTEN = "file-overwritten"

_ON_DEVICE = torch.device("cuda", 0)
_ARCHIVE = b"PK\x03\x04"
# A safetensors file begins with a size in 8 bytes that fits into the first 4.
_HEADER = 8
_FLATTENING = ("_flatten_as_ptr", "_flatten")  # the name changed between releases
_DISTRIBUTED = ".distcp"
# PyTorch's own name for what makes a folder a checkpoint.
_METADATA = ".metadata"
_MAX_COPIED_BYTES = 64 * MIB
_SCRIPT: Any = torch.jit.RecursiveScriptModule  # type: ignore[attr-defined]


class Checkpoints:
    """What a dry run saves, and stand-ins for functions that save and load; `place`, `device_of`: as in `ShapeOnly`."""

    def __init__(
        self,
        files: RedirectedFiles | None,  # where Python's functions have stand-ins; None: what is written is real
        report: Callable[[str, str], None],  # takes (code, text) of each file that holds shapes, unnoticed
        place: Place,
        device_of: Callable[[torch.Tensor], torch.device] = lambda tensor: _ON_DEVICE,
        num_ranks: int = 1,  # processes that the simulated one is said to be one of
    ) -> None:
        self._num_ranks = num_ranks
        self._report = report
        self._files = files
        self._is_active = False
        self._shapes = ShapeOnly(place, device_of)
        self._plain_save: Callable[..., None] = torch.save
        self._plain_load: Callable[..., Any] = torch.load

    def replacements(self) -> list[Replacement]:
        """What to put in place for the time of the dry run."""
        inner, copied = self._of_safetensors()
        copied |= {
            torch.save: self._around(torch, "save", self._save).value,
            torch.load: self._around(torch, "load", self._load).value,
            torch.jit.load: self._around(torch.jit, "load", self._load_script).value,
        }
        inner.append(self._around(*internals.place("file_writer"), self._write))
        # Without TorchScript modules are plain ones.
        if hasattr(_SCRIPT, "save"):
            inner.append(self._around(_SCRIPT, "save", self._save_script))
        return [
            Replacement(self, "_is_active", True),
            *self._shapes.replacements(),
            *inner,
            *(Replacement(*each) for each in held_by_modules(copied)),
            *self._of_h5py(),
            *self._of_numpy(),
            *(self.of_ranks() if self._num_ranks > 1 else []),
        ]

    def _around(self, owner: Any, name: str, other: Callable[..., Any]) -> Replacement:
        return around(owner, name, other, lambda: self._is_active)

    def _target(self, f: Any) -> Any:
        return self._files.target(f) if self._files is not None and _is_path(f) else f

    def _existing(self, f: Any) -> Any:
        return self._files.existing(f) if self._files is not None and _is_path(f) else f

    def _save(self, plain: Plain, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if _is_path(f):
            plain(obj, self._target(f), *args, **kwargs)
            return
        # torch.distributed.checkpoint passes a wrapper of the file.
        name: Any = getattr(f, "name", None) or getattr(getattr(f, "raw", None), "name", None)
        is_file = isinstance(name, str)
        is_own = is_file and (self._files is None or self._files.is_own(name))
        before = self._shapes.num_stored
        plain(_without_zeros(obj) if is_own and name.endswith(_DISTRIBUTED) else obj, f, *args, **kwargs)
        is_users = is_file and not is_own and not name.startswith(tempfile.gettempdir() + os.sep)
        if is_users and self._shapes.num_stored > before:
            self._report(OVERWRITTEN, f"{name} was opened for writing, and now holds shapes without values")

    def _write(self, plain: Plain, f: Any, *args: Any, **kwargs: Any) -> Any:
        """The writer behind torch.save, which some use themselves."""
        return plain(self._target(f), *args, **kwargs)

    def _load(self, plain: Plain, f: Any, map_location: Any = None, pickle_module: Any = None, **kwargs: Any) -> Any:
        if _is_path(f):
            f = os.fspath(self._existing(f))
            if f.endswith(".safetensors"):
                return plain(f, map_location, pickle_module, **kwargs)
            is_cuda = isinstance(map_location, str | torch.device) and torch.device(map_location).type == "cuda"
            if kwargs.get("mmap") is None and is_cuda:
                with open(f, "rb") as file:
                    # Only small tensors keep their values on the simulated device: the others need not be read.
                    kwargs["mmap"] = file.read(len(_ARCHIVE)) == _ARCHIVE or None
        return plain(f, self._shapes.restoring(map_location), pickle_module, **kwargs)

    def _save_script(self, plain: Plain, module: Any, f: Any, **kwargs: Any) -> None:
        plain(module, self._target(f), **kwargs)

    def _load_script(self, plain: Plain, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        # From torch.load, which has been given a stand-in for it.
        map_location = getattr(map_location, "map_location", map_location)
        return plain(self._existing(f), map_location, *args, **kwargs)

    def _of_numpy(self) -> list[Replacement]:
        """Opened for writing, which is numpy's default, a large file would be copied into the overlay."""
        try:
            import numpy
        except ImportError:
            return []
        plain: Callable[..., Any] = numpy.memmap.__new__

        def new(cls: Any, filename: Any, dtype: Any = numpy.uint8, mode: str = "r+", *args: Any, **kwargs: Any) -> Any:
            is_large = _is_path(filename) and os.path.isfile(filename) and os.path.getsize(filename) > _MAX_COPIED_BYTES
            if self._is_active and is_large and mode in ("r+", "readwrite"):
                mode = "c"
            return plain(cls, filename, dtype, mode, *args, **kwargs)

        return [Replacement(numpy.memmap, "__new__", staticmethod(new))]

    def _of_h5py(self) -> list[Replacement]:
        """h5py opens files by itself. Where there is Keras, which saves with it, it is imported here."""
        if self._files is None or ("h5py" not in sys.modules and importlib.util.find_spec("keras") is None):
            return []
        try:
            h5py: Any = importlib.import_module("h5py")
        except Exception:
            return []  # missing, or not fit for this Python: the script can't use it either
        return [self._around(h5py.File, "__init__", self._files.open_h5py)]

    def _of_safetensors(self) -> tuple[list[Replacement], dict[Any, Any]]:
        """What to put in place, and what to put in place of each copy as well; nothing without safetensors."""
        try:
            import safetensors.torch
        except ImportError:
            return [], {}
        module: Any = safetensors.torch
        inner: dict[str, Callable[..., Any]] = dict.fromkeys(
            (name for name in _FLATTENING if hasattr(module, name)), _flatten
        )
        inner |= {"serialize_file": self._serialize_file, "serialize": self._serialize}
        return (
            [self._around(module, name, other) for name, other in inner.items()],
            {
                safetensors.safe_open: self._opening(safetensors.safe_open),
                module.load: self._around(module, "load", self._load_bytes).value,
            },
        )

    def of_ranks(self) -> list[Replacement]:
        """What one of several ranks needs; imports torch.distributed.checkpoint, which takes a while."""
        if not torch.distributed.is_available():
            return []
        return [
            self._around(*internals.place("save_state_dict"), self._save_rank),
            self._around(*internals.place("load_state_dict"), self._load_rank),
        ]

    def _serialize_file(
        self, plain: Plain, tensors: Any, filename: AnyPath, metadata: dict[str, str] | None = None
    ) -> None:
        target = self._target(filename)
        if isinstance(tensors, _Unflattened):
            self._plain_save({"tensors": dict(tensors), "metadata": metadata}, target)
        else:
            plain(tensors, target, metadata=metadata)

    def _serialize(self, plain: Plain, tensors: Any, metadata: dict[str, str] | None = None) -> Any:
        if not isinstance(tensors, _Unflattened):
            return plain(tensors, metadata=metadata)
        buffer = io.BytesIO()
        self._plain_save({"tensors": dict(tensors), "metadata": metadata}, buffer)
        return buffer.getvalue()

    def _load_bytes(self, plain: Plain, data: bytes) -> Any:
        if not _is_archive(data):
            return plain(data)
        return self._stored(io.BytesIO(data), self._to("cpu")).get_tensors()

    def _opening(self, plain: Plain) -> type:
        checkpoints = self

        class safe_open:
            """In the place of safetensors.safe_open, which is a class too."""

            def __new__(cls, filename: AnyPath, framework: str, device: Any = "cpu", **options: Any) -> Any:
                if not checkpoints._is_active:
                    return plain(filename, framework, device=device, **options)
                path = checkpoints._existing(filename)
                deliver = checkpoints._to(device)
                with open(path, "rb") as file:
                    if _is_archive(file.read(_HEADER)):
                        file.seek(0)
                        return checkpoints._stored(file, deliver)
                if deliver.keywords["device"].type != "cuda":
                    return plain(path, framework, device=device, **options)
                return _Delivered(plain(path, framework, device="cpu", **options), deliver)

        return safe_open

    def _stored(self, source: Any, deliver: "functools.partial[torch.Tensor]") -> "_Delivered":
        restoring = self._shapes.restoring(None, keeps_shapes=True)
        return _Delivered(_ShapesFile(**self._plain_load(source, map_location=restoring, weights_only=True)), deliver)

    def _to(self, device: Any) -> "functools.partial[torch.Tensor]":
        device = checked_device(f"cuda:{device}" if isinstance(device, int) else device)
        return functools.partial(self._shapes.deliver, device=device)

    def _save_rank(self, plain: Plain, state_dict: Any, storage_writer: Any, *args: Any, **kwargs: Any) -> Any:
        path = getattr(storage_writer, "path", None)
        if path is None or not _is_one_of_several():
            return plain(state_dict, storage_writer, *args, **kwargs)
        from torch.distributed.checkpoint.metadata import Metadata

        target = self._target(os.path.join(path, _METADATA))
        # In a view of the script's own that is where the script wants it, in a folder that need not be there.
        os.makedirs(os.path.dirname(os.path.abspath(target)), exist_ok=True)
        # Opened here: torch.save refuses a name that begins with its suffix.
        with open(target, "wb") as file:
            self._plain_save(internals.tree_map(_without_zeros, state_dict), file)
        return Metadata(state_dict_metadata={})

    def _load_rank(self, plain: Plain, state_dict: Any, storage_reader: Any, *args: Any, **kwargs: Any) -> None:
        path = getattr(storage_reader, "path", None)
        if path is None or not _is_one_of_several():
            plain(state_dict, storage_reader, *args, **kwargs)
            return
        place = self._existing(os.path.join(path, _METADATA))
        # Written above, by this run: PyTorch's own is no archive.
        if not _begins_archive(place):
            # The user's own: read by one rank for itself.
            plain(state_dict, storage_reader, *args, **{**kwargs, "no_dist": True})
            return
        restoring = self._shapes.restoring(None, keeps_shapes=True)
        _fill(state_dict, self._plain_load(place, map_location=restoring, weights_only=False))


def _is_path(f: Any) -> bool:
    return isinstance(f, str | os.PathLike)


def _begins_archive(path: Any) -> bool:
    try:
        with open(path, "rb") as file:
            return _is_archive(file.read(_HEADER))
    except OSError:
        return False


def _without_zeros(value: Any) -> Any:
    """A large tensor of zeros, as torch.distributed.checkpoint copies simulated ones, as a shape; others as is."""
    plain = type(value) is torch.Tensor and not is_shape_only(value) and value.layout is torch.strided
    if not plain or value.nbytes < MIB:
        return value
    return value if value.contiguous().view(torch.uint8).any() else as_shape(value)


class _Unflattened(dict[str, torch.Tensor]):
    """Tensors, some without values, on their way into a file."""


def _is_one_of_several() -> bool:
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


class _ShapesFile:
    """A file that torch.save wrote, with the methods that an opened safetensors file has."""

    def __init__(self, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> None:
        self.metadata = lambda: metadata
        self.keys = lambda: sorted(tensors)
        self.offset_keys = lambda: list(tensors)
        self.get_tensor = lambda name: _fresh(tensors[name])
        self.get_slice = lambda name: _ShapesSlice(tensors[name])


class _ShapesSlice:
    """A tensor of such a file from which parts can be taken."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.get_shape = lambda: list(tensor.shape)

    def get_dtype(self) -> str:
        import safetensors.torch

        return next(name for name, dtype in safetensors.torch._TYPES.items() if dtype is self._tensor.dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return _fresh(self._tensor[index].contiguous())


@dataclass(eq=False)
class _Delivered:
    """An opened file, or a tensor of it, whose values are taken elsewhere when they are read."""

    _opened: Any
    _deliver: Callable[[torch.Tensor], torch.Tensor]

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

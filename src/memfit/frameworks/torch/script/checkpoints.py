"""Saving and loading during a dry run: the script goes on, and the user's files stay as they are.

Simulated tensors have no values, and a model that a dry run has trained for three steps is nobody's best. So whatever
the script saves goes to a folder of its own, as shapes where there are no values, and is found there when the script
loads it again: by torch.save and torch.load, safetensors, h5py (Keras), torch.distributed.checkpoint, or by opening
files itself. Loading the user's own files to the simulated device works as well; values are read on the host.

The stand-ins are to be in place before the script imports what copies functions, as transformers does with those of
safetensors. Where that has happened before, as in a notebook, the copies are replaced too.
"""

import functools
import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from memfit.core.units import MIB
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.script.file_functions import FileFunctions, Plain
from memfit.frameworks.torch.script.library_files import LibraryFiles, without_zeros
from memfit.frameworks.torch.script.redirected_files import RedirectedFiles, Report
from memfit.frameworks.torch.script.shape_only import Place, ShapeOnly
from memfit.frameworks.torch.shapes.patching import Replacement

OVERWRITTEN = "file-overwritten"

_ON_DEVICE = torch.device("cuda", 0)
_ARCHIVE = b"PK\x03\x04"
_DISTRIBUTED = ".distcp"
_MAX_COPIED_BYTES = 64 * MIB
_SCRIPT: Any = torch.jit.RecursiveScriptModule  # type: ignore[attr-defined]


class Checkpoints:
    """What a dry run saves, and stand-ins for the functions that save and load.

    Args:
        folder: where redirected files go; None: a new temporary folder, made on first use.
        report: takes (code, text) of each file redirected and each deletion skipped.
        place: moves a real host tensor to the simulated device or revives a shape-only one there, and returns it.
        device_of: where a shape-only tensor is shown to be.
        num_ranks: processes that the simulated one is said to be one of.
        private: whether nobody but the script sees what it writes.
    """

    def __init__(
        self,
        folder: str | None,
        report: Report,
        place: Place,
        device_of: Callable[[torch.Tensor], torch.device] = lambda tensor: _ON_DEVICE,
        num_ranks: int = 1,
        *,
        private: bool = False,
    ) -> None:
        self._num_ranks = num_ranks
        self._report = report
        self._files = RedirectedFiles(folder, report, private=private)
        self._functions = FileFunctions(self._files)
        self._shapes = ShapeOnly(place, device_of)
        self._libraries = LibraryFiles(self._files, self._functions, self._shapes)
        self._plain_save: Callable[..., None] = torch.save
        self._plain_load: Callable[..., Any] = torch.load
        self._plain_load_script: Callable[..., Any] = torch.jit.load
        self.finish = self._files.finish
        """Removes what the script's checkpoints left behind beside the user's; to be called after the dry run."""
        self.of_ranks = self._libraries.of_ranks
        """What one of several ranks needs beside the other replacements."""
        self.redirected = self._files.redirected
        """Absolute path asked for -> path written."""
        self.are_private = private

    def replacements(self) -> list[Replacement]:
        """What to put in place for the time of the dry run."""
        stand_in = self._functions.stand_in
        inner, copied = self._libraries.of_safetensors()
        copied += [
            Replacement(torch, "save", stand_in(self._plain_save, self._save)),
            Replacement(torch, "load", stand_in(self._plain_load, self._load)),
            Replacement(torch.jit, "load", stand_in(self._plain_load_script, self._load_script)),
        ]
        owner, name = internals.place("file_writer")
        writing = functools.partial(self._write, getattr(owner, name))
        inner.append(Replacement(owner, name, stand_in(getattr(owner, name), writing)))
        # Without TorchScript modules are plain ones.
        save_script = getattr(_SCRIPT, "save", None)
        if save_script is not None:

            def saving(module: Any, f: Any, **kwargs: Any) -> None:
                save_script(module, self._files.target(f), **kwargs)

            inner.append(Replacement(_SCRIPT, "save", stand_in(save_script, saving)))
        return [
            *self._functions.replacements(),
            *self._shapes.replacements(),
            *inner,
            *_with_copies(copied),
            *self._of_h5py(),
            *(self._of_numpy() if self.are_private else []),
            *(self.of_ranks() if self._num_ranks > 1 else []),
        ]

    def _save(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if _is_path(f):
            self._plain_save(obj, self._files.target(f) if self._files.is_regular(f) else f, *args, **kwargs)
            return
        # torch.distributed.checkpoint passes a wrapper of the file.
        name = getattr(f, "name", None) or getattr(getattr(f, "raw", None), "name", None)
        if not isinstance(name, str):
            self._plain_save(obj, f, *args, **kwargs)
            return
        if name.endswith(_DISTRIBUTED) and self._files.is_own(name):
            obj = without_zeros(obj)
        before = self._shapes.num_stored
        self._plain_save(obj, f, *args, **kwargs)
        is_apart = self._files.is_own(name) or name.startswith(tempfile.gettempdir() + os.sep)
        if self._shapes.num_stored > before and not is_apart:
            self._report(
                OVERWRITTEN,
                f"{name} was opened for writing, and nothing in its name says that it is a checkpoint: "
                "it now holds shapes without values",
            )

    def _write(self, plain: Plain, f: Any, *args: Any, **kwargs: Any) -> Any:
        """The writer behind torch.save, which some use themselves."""
        is_redirected = _is_path(f) and not self._files.is_own(f) and self._files.is_regular(f)
        return plain(self._files.target(f) if is_redirected else f, *args, **kwargs)

    def _load(self, f: Any, map_location: Any = None, pickle_module: Any = None, **kwargs: Any) -> Any:
        if _is_path(f):
            f = os.fspath(self._files.existing(f))
            if f.endswith(".safetensors"):
                return self._plain_load(f, map_location, pickle_module, **kwargs)
            is_cuda = isinstance(map_location, str | torch.device) and torch.device(map_location).type == "cuda"
            if kwargs.get("mmap") is None and is_cuda:
                with open(f, "rb") as file:
                    # Only small tensors keep their values on the simulated device: the others need not be read.
                    kwargs["mmap"] = file.read(len(_ARCHIVE)) == _ARCHIVE or None
        return self._plain_load(f, self._shapes.restoring(map_location), pickle_module, **kwargs)

    def _load_script(self, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        # From torch.load, which has been given a stand-in for it.
        map_location = getattr(map_location, "given", map_location)
        return self._plain_load_script(self._files.existing(f) if _is_path(f) else f, map_location, *args, **kwargs)

    def _of_numpy(self) -> list[Replacement]:
        """Opened for writing, which is numpy's default, a large file would be copied into the overlay."""
        try:
            import numpy
        except ImportError:
            return []
        plain: Callable[..., Any] = numpy.memmap.__new__

        def new(cls: Any, filename: Any, dtype: Any = numpy.uint8, mode: str = "r+", *args: Any, **kwargs: Any) -> Any:
            is_large = _is_path(filename) and os.path.isfile(filename) and os.path.getsize(filename) > _MAX_COPIED_BYTES
            if self._functions.is_active and is_large and mode in ("r+", "readwrite"):
                mode = "c"
            return plain(cls, filename, dtype, mode, *args, **kwargs)

        return [Replacement(numpy.memmap, "__new__", staticmethod(new))]

    def _of_h5py(self) -> list[Replacement]:
        """h5py opens files by itself. Where there is Keras, which saves with it, it is imported here."""
        if "h5py" not in sys.modules and importlib.util.find_spec("keras") is None:
            return []
        try:
            h5py: Any = importlib.import_module("h5py")
        except Exception:
            return []  # missing, or not fit for this Python: the script can't use it either
        plain = h5py.File.__init__

        def init(file: Any, name: Any, mode: str | None = "r", *args: Any, **kwargs: Any) -> None:
            if _is_path(name) or isinstance(name, bytes):
                name = self._files.opened(name, {None: "r", "w-": "x"}.get(mode, str(mode)))
            plain(file, name, mode, *args, **kwargs)

        return [Replacement(h5py.File, "__init__", self._functions.stand_in(plain, init))]


def _with_copies(replacements: list[Replacement]) -> list[Replacement]:
    """The same for every module that holds the function to be replaced, under whatever name."""
    values = {id(getattr(owner, name)): value for owner, name, value in replacements}
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    return [
        Replacement(module, name, values[id(held)])
        for module in modules
        for name, held in list(vars(module).items())
        if id(held) in values
    ]


def _is_path(f: Any) -> bool:
    return isinstance(f, str | os.PathLike)

"""Checkpoints of torch.distributed.checkpoint, seen from one rank of several.

PyTorch's writer puts the parts of all ranks together and refuses when some are missing, and in a simulation there is
only one rank. So what that rank holds is saved in one file, as shapes. Loading it leaves tensors as they are, for they
have no values anyway, and restores everything else. With one rank nothing of this is needed.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch.utils._pytree import tree_map

from memfit.adapters.torch.file_functions import FileFunctions
from memfit.adapters.torch.redirected_files import RedirectedFiles
from memfit.adapters.torch.replacement import Replacement
from memfit.adapters.torch.shape_only import ShapeOnly, as_shape, is_shape_only
from memfit.core.units import MIB

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


class DistributedFiles:
    """Stand-ins for what saves and loads the parts of a rank.

    Args:
        files: says which file is where.
        functions: knows for how long stand-ins are to act.
        shapes: stores and revives tensors without values.
    """

    def __init__(self, files: RedirectedFiles, functions: FileFunctions, shapes: ShapeOnly) -> None:
        self._files = files
        self._functions = functions
        self._shapes = shapes
        self._plain_save: Callable[..., None] = torch.save
        self._plain_load: Callable[..., Any] = torch.load

    def replacements(self) -> list[Replacement]:
        """What to put in place; imports torch.distributed.checkpoint, which takes a while."""
        if not torch.distributed.is_available():
            return []
        import torch.distributed.checkpoint.state_dict_loader as loader
        import torch.distributed.checkpoint.state_dict_saver as saver

        return [
            Replacement(owner, name, self._functions.stand_in(plain, functools.partial(other, plain)))
            for owner, name, other in (
                (saver, "_save_state_dict", self._save),
                (loader, "_load_state_dict", self._load),
            )
            for plain in [getattr(owner, name)]
        ]

    def _save(self, plain: Callable[..., Any], state_dict: Any, storage_writer: Any, *args: Any, **kwargs: Any) -> Any:
        path = getattr(storage_writer, "path", None)
        if path is None or not _is_shared():
            return plain(state_dict, storage_writer, *args, **kwargs)
        from torch.distributed.checkpoint.metadata import Metadata

        # Opened here: torch.save refuses a name that begins with its suffix.
        with open(self._files.target(os.path.join(path, _METADATA)), "wb") as file:
            self._plain_save(tree_map(without_zeros, state_dict), file)
        return Metadata(state_dict_metadata={})

    def _load(self, plain: Callable[..., Any], state_dict: Any, storage_reader: Any, *args: Any, **kwargs: Any) -> None:
        path = getattr(storage_reader, "path", None)
        if path is None or not _is_shared():
            plain(state_dict, storage_reader, *args, **kwargs)
            return
        saved = self._files.known(os.path.join(path, _METADATA))
        if saved not in self._files.redirected:
            # The user's own: read by one rank for itself.
            plain(state_dict, storage_reader, *args, **{**kwargs, "no_dist": True})
            return
        restore = self._shapes.restoring(None, keeps_shapes=True)
        # Written above, by this run.
        content = self._plain_load(self._files.redirected[str(saved)], map_location=restore, weights_only=False)
        _fill(state_dict, content)


def _is_shared() -> bool:
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def _fill(held: Any, content: dict[Any, Any]) -> None:
    for key, value in content.items():
        if isinstance(held.get(key), dict) and isinstance(value, dict):
            _fill(held[key], value)
        elif key in held and not isinstance(held[key], torch.Tensor):
            held[key] = value

"""PyTorch's tensors in the files of a checkpoint: values in safetensors files, tags in the tree of JSON.

Values are written and read a few megabytes at a time, whatever a tensor's device and layout. Of a tensor that is spread
over several processes (DTensor), the tree holds a description, and its parts go to files of their own: PyTorch's
distributed checkpoint in the safetensors format, which finds the parts that each process needs, however many processes
wrote and read. PyTorch's own format isn't used: it begins with a pickled file.
"""

import json
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from memfit.core import state_tree, tensor_file
from memfit.core.errors import BadInput
from memfit.core.guarding import BadCheckpoint
from memfit.core.tensor_file import TensorEntry, TensorFile, array_entry

_TREE = "memfit.tree"


def write_tensors(path: Path, tensors: Mapping[str, Any], tree: Any = None) -> None:
    """Writes dense tensors, and arrays of numpy, into one file, with the tree that they belong to, if it is given."""
    entries = [
        tensor_entry(name, value) if isinstance(value, torch.Tensor) else array_entry(name, value)
        for name, value in tensors.items()
    ]
    text = {} if tree is None else {_TREE: json.dumps(tree, allow_nan=False)}
    tensor_file.write(path, entries, {"format": "pt", **text})


def read_tree(file: TensorFile) -> Any:
    """The tree that was written into a file; None for one that holds tensors alone, whoever wrote it."""
    try:
        return json.loads(file.metadata.get(_TREE, "null"))
    except (ValueError, RecursionError):
        raise BadCheckpoint(f"{file.path} is damaged: what it says of its tensors is no JSON") from None


def tensor_entry(name: str, tensor: torch.Tensor) -> TensorEntry:
    """A dense tensor to be written."""

    def pieces() -> Iterator[memoryview]:
        for piece in _pieces(tensor.detach()):
            # Conjugated and negated views are resolved by a copy; their flags would stop the change of type. A single
            # element counts as contiguous whatever its stride, which would stop it too.
            plain = piece.to("cpu").contiguous().resolve_conj().resolve_neg()
            yield plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data

    return TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), tensor.element_size(), pieces)


def copy_into(file: TensorFile, name: str, target: torch.Tensor) -> None:
    """Gives a tensor of the same shape and type the values in the file; its device and layout stay."""

    def buffers() -> Iterator[memoryview]:
        """To be filled; their bytes are copied to their places when the next one is asked for."""
        whole = torch.empty(0, dtype=torch.uint8)
        for piece in _pieces(target.detach()):
            size_bytes = piece.numel() * piece.element_size()
            if len(whole) < size_bytes:
                whole = torch.empty(size_bytes, dtype=torch.uint8)
            yield whole[:size_bytes].numpy().data
            piece.copy_(whole[:size_bytes].view(piece.dtype).view(piece.shape))

    with torch.no_grad():
        file.read_into(name, buffers())


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of a tensor that have its elements in order, each of at most CHUNK_BYTES where that is possible."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(max(1, tensor_file.CHUNK_BYTES // tensor.element_size()))
        return
    row_bytes = tensor.element_size() * tensor.numel() // len(tensor)
    if row_bytes > tensor_file.CHUNK_BYTES and tensor.dim() > 1:
        for row in tensor:
            yield from _pieces(row)
        return
    yield from tensor.split(max(1, tensor_file.CHUNK_BYTES // row_bytes))


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type, without the package's."""
    return str(dtype).removeprefix("torch.")


def named_dtype(name: str) -> torch.dtype:
    """The type of tensors with this name."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of tensors")
    return dtype


def is_shard(value: Any) -> bool:
    """True for a DTensor, of which this process holds a shard."""
    # Before `torch.distributed` is in use nothing is a DTensor, and importing it takes a second.
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh") and hasattr(value, "placements")


class TensorEncoder(state_tree.Encoder):
    """Turns values into JSON and collects their tensors; arguments as for `core.state_tree.Encoder`."""

    def __init__(self, *, skips_functions: bool = False) -> None:
        super().__init__(skips_functions=skips_functions)
        self.shards: dict[str, torch.Tensor] = {}  # tensors that are spread over processes, by their names in the tree
        self._seen: dict[tuple[Any, ...], str] = {}

    def encode_special(self, value: Any, path: str) -> Any:
        """Tensors, types, devices and shapes."""
        if is_shard(value):
            self.shards[path] = value.detach()
            return {"__shard__": path, "dtype": dtype_name(value.dtype), "shape": [*value.shape]}
        if isinstance(value, torch.Tensor):
            return self.tensor(value, path)
        if isinstance(value, torch.dtype):
            return {"__dtype__": dtype_name(value)}
        if isinstance(value, torch.device):
            return {"__device__": str(value)}
        if isinstance(value, torch.Size):
            return {"__size__": [*value]}
        # The default of a defaultdict is a function; its entries are all that a state needs.
        return self.encode(dict(value), path) if type(value) is defaultdict else None

    def tensor(self, value: torch.Tensor, path: str) -> dict[str, Any]:
        """The tag of a tensor; one that was met before, under whatever name, is stored once."""
        if is_lazy(value):
            special = "a parameter that has no shape yet; run the model once first"
        elif value.layout is not torch.strided or value.is_quantized or value.is_nested:
            special = f"a tensor of layout {value.layout}"
        elif value.device.type == "meta":
            special = "a tensor without values (device meta)"
        elif hasattr(type(value), "__tensor_flatten__"):
            special = f"a tensor of the special type {type(value).__module__}.{type(value).__qualname__}"
        else:
            special = ""
        if special:
            raise BadCheckpoint(f"{path} is {special}, and a checkpoint holds ordinary dense tensors")
        key = (value.device, value.data_ptr(), value.dtype, *value.shape, *value.stride())
        # All tensors without elements have one address.
        name = self._seen.setdefault(key, path) if value.numel() else path
        self.tensors.setdefault(name, value)
        tag: dict[str, Any] = {"__tensor__": name, "dtype": dtype_name(value.dtype)}
        if value.device.type != "cpu":
            tag["device"] = value.device.type
        if not value.is_contiguous():
            tag["stride"] = [*value.stride()]
        return tag


class TensorDecoder(state_tree.Decoder):
    """Turns JSON back into values; tensors that were not on the CPU are put on the device `home`."""

    def __init__(self, file: TensorFile, home: torch.device | None = None) -> None:
        super().__init__(file)
        self._home = home

    def decode_special(self, tag: str, value: dict[str, Any]) -> Any:
        """Tensors, types, devices and shapes."""
        match tag:
            case "__tensor__":
                return self._tensor(value)
            case "__dtype__":
                return named_dtype(value[tag])
            case "__device__":
                return torch.device(value[tag])
            case "__size__":
                return torch.Size(value[tag])
        return super().decode_special(tag, value)

    def _tensor(self, tag: dict[str, Any]) -> torch.Tensor:
        dtype, shape = described(self._file, tag)
        home = self._home if "device" in tag else None
        stride = tag.get("stride")
        if stride is None:
            tensor = torch.empty(shape, dtype=dtype, device=home)
        elif sum((size - 1) * abs(step) for size, step in zip(shape, stride, strict=True)) > 4 * math.prod(shape):
            tensor = torch.empty(shape, dtype=dtype, device=home)  # what was a small part of something larger
        else:
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device=home)
        if tensor.numel() and any(step == 0 for step in tensor.stride()):
            tensor = tensor.contiguous()  # an expanded tensor has no place for its elements
        copy_into(self._file, tag["__tensor__"], tensor)
        return tensor


def described(file: TensorFile, tag: dict[str, Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Type and shape of the tensor that a tag stands for, whole or spread over processes."""
    dtype = named_dtype(tag["dtype"])
    if "__shard__" in tag:
        return dtype, tuple(tag["shape"])
    return dtype, file.shape_as(tag["__tensor__"], dtype_name(dtype), dtype.itemsize)


# Tensors that are spread over processes.

SHARDS = "shards"  # folder of their files


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Which process this is; 0 where there is only one."""
    return dist.get_rank() if _is_distributed() else 0


def num_ranks() -> int:
    """How many processes there are."""
    return dist.get_world_size() if _is_distributed() else 1


def write_shards(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes tensors by name, each process its own parts; all call this, and an OSError is raised on all."""
    try:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

        writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    except (ImportError, TypeError):
        raise BadInput(
            "checkpoints of sharded models need a PyTorch that writes parts of tensors as safetensors, and "
            f"{torch.__version__} doesn't. Install a newer one, or train without checkpoints."
        ) from None
    _run_distributed("save", tensors, storage_writer=writer)


def read_shards(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Gives tensors, whole or spread over processes, the values in the files; all processes call this."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    _run_distributed("load", tensors, storage_reader=HuggingFaceStorageReader(str(directory)))


def _run_distributed(verb: str, tensors: dict[str, torch.Tensor], **options: Any) -> None:
    import torch.distributed.checkpoint as distributed_checkpoint

    try:
        with warnings.catch_warnings():
            # It says that there is only one process where that is so.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            getattr(distributed_checkpoint, verb)(tensors, no_dist=not _is_distributed(), **options)
    except distributed_checkpoint.api.CheckpointException as error:
        # It is raised on all processes, with what happened on each.
        causes = [cause for cause, _ in error.failures.values()]
        failed = next((cause for cause in causes if isinstance(cause, OSError)), None)
        if failed is not None:
            raise OSError(failed.errno, f"{failed.strerror or failed}, on process {min(error.failures)}") from error
        raise

"""Tensors that are spread over processes, in files: PyTorch's distributed checkpoint in the safetensors format.

It finds the parts that each process needs, however many processes wrote and read. PyTorch's own format isn't used: it
begins with a pickled file.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from memfit.core.errors import BadInput

FOLDER = "shards"


def rank() -> int:
    """Which process this is; 0 where there is only one."""
    return dist.get_rank() if _is_distributed() else 0


def num_ranks() -> int:
    """How many processes there are."""
    return dist.get_world_size() if _is_distributed() else 1


def write(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes tensors by name, each process its own parts; all call this, and an OSError is raised on all."""
    try:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

        writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    except (ImportError, TypeError):
        raise BadInput(
            "checkpoints of sharded models need a PyTorch that writes parts of tensors as safetensors, and "
            f"{torch.__version__} doesn't. Install a newer one, or train without checkpoints."
        ) from None
    _run("save", tensors, storage_writer=writer)


def read(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Gives tensors, whole or spread over processes, the values in the files; all processes call this."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    _run("load", tensors, storage_reader=HuggingFaceStorageReader(str(directory)))


def _run(verb: str, tensors: dict[str, torch.Tensor], **options: Any) -> None:
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


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()

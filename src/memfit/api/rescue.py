"""`memfit.rescue`: activations move away when an operation of a plain loop runs out of memory, and it runs again."""

from typing import TYPE_CHECKING

from memfit.api.jobs import torch_adapter
from memfit.core.units import parse_size

if TYPE_CHECKING:
    from memfit.frameworks.torch.rescue import Rescue


def rescue(*, eager: bool = False, limit: str | int | None = None, folder: str | None = None) -> "Rescue":
    """Rescues this thread's PyTorch loop from running out of memory, until `close()` or for a `with` block.

    Args:
        eager: whether all that is saved for the backward pass moves away at once, not only when memory runs out: for
            limits that kill without an exception.
        limit: host memory that the process may have, "10GiB" or bytes; None for what its limits and the machine say.
        folder: where the files of activations go; None to choose one on a disk.
    """
    limit_bytes = None if limit is None else parse_size(limit)
    torch_adapter()
    from memfit.frameworks.torch.rescue import Rescue

    return Rescue(eager=eager, limit_bytes=limit_bytes, folder=folder)

"""What autograd saves for the backward pass, in order, and moved away when its memory is needed.

Every saved tensor becomes a `Saved`, which keeps an alias of it, and with it PyTorch's count of writes: autograd
doesn't check that count for tensors that hooks have taken, so it is checked here. Saved tensors of one storage are
moved together, as the storage they share, and only if nobody else holds it: a storage that the script still has in a
variable, an operation among its arguments or a model among its parameters would not be freed.

Backward passes need last what was saved first, so that moves first.
"""

import weakref
from collections.abc import Callable
from functools import cache

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memfit.frameworks.torch import internals
from memfit.frameworks.torch.rescue.copies import Copy

LEAST_BYTES = 256 * 1024  # smaller storages are not worth a file each

_MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "[{kind} {shape}] is at version {now}; expected version {then} instead. Hint: enable anomaly detection to find the "
    "operation that failed to compute its gradient, with torch.autograd.set_detect_anomaly(True)."
)

CopyMaker = Callable[[torch.UntypedStorage], Copy]  # copies a storage to where it can wait
Rerun = Callable[[Callable[[], torch.UntypedStorage]], torch.UntypedStorage]
"""Runs something that needs memory, and makes room for it if there is none."""


class SavedBlock:
    """A storage with all that is saved of it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        # As long as this weak reference lives, no other storage has the address of this one's record.
        self._reference = StorageWeakRef(storage)
        self.key: int = self._reference.cdata
        self.num_bytes = storage.nbytes()
        self.device = storage.device
        self.saved: weakref.WeakSet[Saved] = weakref.WeakSet()
        self.copy: Copy | None = None

    def is_ours_alone(self) -> bool:
        """Whether its memory would be free if the saved tensors let go of it."""
        return int(internals.storage_use_count(self.key)) <= len(self.saved) + _extra_uses()

    def move_away(self, make_copy: CopyMaker) -> None:
        """Copies the elements to where they wait, and lets go of the storage."""
        self.copy = make_copy(next(iter(self.saved)).alias.untyped_storage())
        for saved in self.saved:
            saved.let_go()


class Saved:
    """One tensor that is saved for the backward pass; without a block it stays where it is.

    The alias has no history: a tensor that knows how it was computed would keep itself alive.
    """

    __slots__ = ("__weakref__", "_block", "_layout", "_version", "alias")

    def __init__(self, alias: torch.Tensor, block: SavedBlock | None) -> None:
        self.alias = alias
        self._version = internals.version_of(alias)
        self._block = block
        self._layout: tuple[tuple[int, ...], tuple[int, ...], int] | None = None  # when the elements are away
        if block is not None:
            block.saved.add(self)

    def let_go(self) -> None:
        """The elements wait elsewhere; an alias without any still counts the writes to what it was made from."""
        alias = self.alias
        self._layout = tuple(alias.shape), alias.stride(), int(alias.storage_offset())
        alias.data = torch.empty(0, dtype=alias.dtype, device=alias.device)

    def tensor(self, rerun: Rerun) -> torch.Tensor:
        """The tensor as it was saved; refused, as by autograd itself, if it has been written to since."""
        alias, block = self.alias, self._block
        version = internals.version_of(alias)
        if version != self._version:
            size = list(alias.shape if self._layout is None else self._layout[0])
            message = _MODIFIED.format(kind=alias.type(), shape=size, now=version, then=self._version)
            raise RuntimeError(message)
        if block is None:
            return alias
        if self._layout is None or block.copy is None:
            # Not the alias itself: a storage that autograd uses must have one more user than is saved of it.
            return alias.detach()
        shape, strides, offset = self._layout
        storage = rerun(block.copy.storage)
        return torch.empty(0, dtype=alias.dtype, device=storage.device).set_(storage, offset, shape, strides)


class Shelf:
    """All that is saved for backward passes to come, oldest first; `eager`: moved away as soon as it can be."""

    def __init__(self, make_copy: CopyMaker, rerun: Rerun, *, eager: bool = False) -> None:
        self._make_copy = make_copy
        self._rerun = rerun
        self._eager = eager
        # A block goes with the last tensor that is saved of it.
        self._blocks: weakref.WeakValueDictionary[int, SavedBlock] = weakref.WeakValueDictionary()
        self.moved_bytes = 0  # bytes moved away so far, over all steps

    def __len__(self) -> int:
        return len(self._blocks)

    def pack(self, tensor: torch.Tensor) -> Saved:
        """Takes a tensor that autograd saves."""
        if not _is_plain(tensor):
            return Saved(tensor.detach() if tensor.grad_fn is not None else tensor, None)
        # Not an operation of the script: no mode of it needs to see this.
        with internals.disable_torch_dispatch():
            alias = tensor.detach()
            storage = tensor.untyped_storage()
            # The transposed weight that a linear layer saves is a view of the parameter. The alias isn't one: views
            # that are made without gradients don't count as such.
            base = internals.base_of(tensor)
            is_of_parameter = base is not None and base.is_leaf and base.requires_grad
            if storage.nbytes() < LEAST_BYTES or is_of_parameter:
                return Saved(alias, None)
            # What is saved again is needed sooner: it moves to the end of the order.
            block = self._blocks.pop(internals.storage_address(storage), None) or SavedBlock(storage)
            self._blocks[block.key] = block
            del storage
            saved = Saved(alias, block)
        if self._eager:
            self.free(None)
        return saved

    def unpack(self, saved: Saved) -> torch.Tensor:
        """Gives a tensor back to autograd."""
        with internals.disable_torch_dispatch(), torch.no_grad():
            return saved.tensor(self._rerun)

    def free(self, num_bytes: int | None, *, on_host: bool | None = None) -> int:
        """Moves blocks away until enough is free, oldest first; the bytes freed. None: all there is, everywhere."""
        freed = 0
        with internals.disable_torch_dispatch(), torch.no_grad():
            for block in list(self._blocks.values()):
                if num_bytes is not None and freed >= num_bytes:
                    break
                if on_host not in (None, block.device.type == "cpu") or not block.saved or not block.is_ours_alone():
                    continue
                # It needn't be looked at again: nobody else can save a storage that nobody else has.
                block.move_away(self._make_copy)
                self._blocks.pop(block.key, None)
                freed += block.num_bytes
                self.moved_bytes += block.num_bytes
        return freed


def _is_plain(tensor: torch.Tensor) -> bool:
    """True for a tensor that is nothing but a storage and a layout."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not internals.is_functorch_tensor(tensor)
        and not internals.is_functional_tensor(tensor)
    )


@cache
def _extra_uses() -> int:
    """By how much PyTorch's count of a storage's users exceeds the tensors: newer releases count the Python object."""
    tensor = torch.empty(1)
    return int(internals.storage_use_count(internals.storage_address(tensor.untyped_storage()))) - 1

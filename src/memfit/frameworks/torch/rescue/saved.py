"""What autograd saves for the backward pass, in order, and moved away when its memory is needed.

Every saved tensor becomes a `Saved`, which keeps an alias of it, and with it PyTorch's count of writes: autograd
doesn't check that count for tensors that hooks have taken, so it is checked here. Saved tensors of one storage are
moved together, as the storage they share, and only if nobody else holds it: a storage that the script still has in a
variable, an operation among its arguments or a model among its parameters would not be freed.

Backward passes need last what was saved first, so that moves first.
"""

import itertools
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


class Block:
    """A storage with all that is saved of it."""

    __slots__ = ("_copy", "_layouts", "_reference", "device", "num_bytes", "tensors")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        # As long as this weak reference lives, no other storage gets the same address.
        self._reference = StorageWeakRef(storage)
        self.num_bytes = storage.nbytes()
        self.device = storage.device
        self.tensors: dict[int, torch.Tensor] = {}  # aliases that saved tensors keep, by their numbers
        self._copy: Copy | None = None
        self._layouts: dict[int, tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]] = {}
        """Type, shape, strides and offset of each tensor, when the elements are away."""

    @property
    def key(self) -> int:
        """Address of the storage's record, which is its own until this object is gone."""
        address: int = self._reference.cdata
        return address

    def is_ours_alone(self) -> bool:
        """Whether its memory would be free if the saved tensors let go of it."""
        return int(internals.storage_use_count(self.key)) <= len(self.tensors) + _extra_uses()

    def move_away(self, make_copy: CopyMaker) -> None:
        """Copies the elements to where they wait, and lets go of the storage."""
        copy = make_copy(next(iter(self.tensors.values())).untyped_storage())
        self._layouts = {
            number: (tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
            for number, tensor in self.tensors.items()
        }
        self._copy = copy
        for tensor in self.tensors.values():
            # An alias without elements still counts the writes to the tensor it was made from.
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def shape(self, number: int) -> tuple[int, ...]:
        """Shape of the tensor of this number."""
        return tuple(self.tensors[number].shape) if self._copy is None else self._layouts[number][1]

    def bring_back(self, number: int, rerun: Rerun) -> torch.Tensor:
        """The tensor of this number, on its device."""
        if self._copy is None:
            # Not the alias itself, which loses its elements when it is moved; another one is a user of the storage.
            return self.tensors[number].detach()
        dtype, shape, strides, offset = self._layouts[number]
        storage = rerun(self._copy.storage)
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)


class Saved:
    """One tensor that is saved for the backward pass.

    Args:
        tensor: an alias of it, without history: a tensor that knows how it was computed would keep itself alive.
        number: its place in the order of saving.
        block: what it shares its storage with; None if it stays where it is.
        shelf: what it is kept on.
    """

    __slots__ = ("_alias", "_block", "_number", "_shelf", "_version")

    def __init__(self, tensor: torch.Tensor, number: int, block: Block | None, shelf: "Shelf") -> None:
        self._version = tensor._version
        self._number = number
        self._block = block
        self._shelf = shelf
        self._alias: torch.Tensor | None = tensor
        if block is not None:
            block.tensors[number] = tensor
            self._alias = None

    def tensor(self) -> torch.Tensor:
        """The tensor as it was saved; refused, as by autograd itself, if it has been written to since."""
        alias = self._alias if self._block is None else self._block.tensors[self._number]
        assert alias is not None
        if alias._version != self._version:
            shape = list(alias.shape if self._block is None else self._block.shape(self._number))
            message = _MODIFIED.format(kind=alias.type(), shape=shape, now=alias._version, then=self._version)
            raise RuntimeError(message)
        return alias if self._block is None else self._block.bring_back(self._number, self._shelf.rerun)

    def __del__(self) -> None:
        if self._block is not None:
            self._shelf.drop(self._block, self._number)


class Shelf:
    """All that is saved for backward passes to come, oldest first; `eager`: moved away as soon as it can be."""

    def __init__(self, make_copy: CopyMaker, rerun: Rerun, *, eager: bool = False) -> None:
        self._make_copy = make_copy
        self.rerun = rerun
        self._eager = eager
        self._blocks: dict[int, Block] = {}
        self._numbers = itertools.count()
        self.moved_bytes = 0  # bytes moved away so far, over all steps

    def __len__(self) -> int:
        return len(self._blocks)

    def pack(self, tensor: torch.Tensor) -> Saved:
        """Takes a tensor that autograd saves."""
        if not _is_plain(tensor):
            return Saved(tensor.detach() if tensor.grad_fn is not None else tensor, 0, None, self)
        # Not an operation of the script: no mode of it needs to see this.
        with internals.disable_torch_dispatch():
            alias = tensor.detach()
            storage = tensor.untyped_storage()
            if storage.nbytes() < LEAST_BYTES or _is_parameter(tensor):
                return Saved(alias, 0, None, self)
            # What is saved again is needed sooner: it moves to the end of the order.
            block = self._blocks.pop(internals.storage_address(storage), None) or Block(storage)
            self._blocks[block.key] = block
            del storage
            saved = Saved(alias, next(self._numbers), block, self)
        if self._eager:
            self.free(None)
        return saved

    def unpack(self, saved: Saved) -> torch.Tensor:
        """Gives a tensor back to autograd."""
        with internals.disable_torch_dispatch(), torch.no_grad():
            return saved.tensor()

    def free(self, num_bytes: int | None, *, on_host: bool | None = None) -> int:
        """Moves blocks away until enough is free, oldest first; the bytes freed. None: all that can be, on all devices."""
        freed = 0
        with internals.disable_torch_dispatch(), torch.no_grad():
            for block in list(self._blocks.values()):
                if num_bytes is not None and freed >= num_bytes:
                    break
                if on_host is not None and on_host != (block.device.type == "cpu"):
                    continue
                if not block.is_ours_alone():
                    continue
                # It needn't be looked at again: nobody else can save a storage that nobody else has.
                block.move_away(self._make_copy)
                self._blocks.pop(block.key, None)
                freed += block.num_bytes
                self.moved_bytes += block.num_bytes
        return freed

    def drop(self, block: Block, number: int) -> None:
        """A saved tensor is gone."""
        block.tensors.pop(number, None)
        if not block.tensors:
            self._blocks.pop(block.key, None)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is nothing but a storage and a layout."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not internals.is_functorch_tensor(tensor)
        and not internals.is_functional_tensor(tensor)
    )


def _is_parameter(tensor: torch.Tensor) -> bool:
    # The transposed weight that a linear layer saves is a view of the parameter. The alias isn't one: views that are
    # made without gradients don't count as such.
    base = internals.base_of(tensor)
    return base is not None and base.is_leaf and base.requires_grad


@cache
def _extra_uses() -> int:
    """By how much PyTorch's count of a storage's users exceeds the tensors: newer releases count the Python object."""
    tensor = torch.empty(1)
    return int(internals.storage_use_count(internals.storage_address(tensor.untyped_storage()))) - 1

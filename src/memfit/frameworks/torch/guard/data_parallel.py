"""Processes that hold a copy of the model each: `DistributedDataParallel`.

DDP sums gradients while the backward pass runs, and broadcasts buffers in the forward pass: one process that runs out
of memory there leaves the others waiting. So no pass communicates: all run under `no_sync`, the buffers are broadcast
before the first of them, and gradients are summed after a vote has told that all processes have theirs. What it costs
is that the sum no longer overlaps with the backward pass. Communication hooks of DDP (compressed gradients) are not
run: a sum is a sum.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from memfit.frameworks.torch import internals
from memfit.frameworks.torch.guard.rank_exchange import ExchangingRanks, surely

BUCKET_BYTES = 4 << 20
"""Small gradients are summed together, in a buffer of this size; larger ones by themselves, where they are."""

_SPARSE = 2


class DataParallel(ExchangingRanks):
    """The processes of a `DistributedDataParallel` model. Each has all gradients, so each clips its own."""

    def __init__(self, model: DistributedDataParallel) -> None:
        parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
        super().__init__(model, model.process_group, most=max(64, 2 * len(parameters)))
        self._ddp = model
        # Memory may be short when gradients are summed, so what that needs is held from the beginning.
        lengths = {(parameter.device, parameter.dtype): 0 for parameter in parameters}
        for parameter in filter(_is_small, parameters):
            lengths[parameter.device, parameter.dtype] += parameter.numel()
        self._buckets = {
            (device, dtype): torch.empty(min(length, BUCKET_BYTES // dtype.itemsize), device=device, dtype=dtype)
            for (device, dtype), length in lengths.items()
        }
        # Only synchronized batch norm communicates within a pass.
        self.communicates = any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules())

    def begin(self) -> None:
        """Broadcasts the buffers, as DDP's forward pass would; refuses a model that is used in a `Join`."""
        if internals.is_joined(self._ddp):
            raise ValueError(
                "the guard was given a DistributedDataParallel model within its `join` context, which expects each "
                "forward pass to communicate. Leave `join` out: give each process as many batches as the others."
            )
        internals.share_buffers(self._ddp)

    def run(self, num_passes: int, run_part: Callable[[int], None], smallest: Callable[[], None]) -> None:
        """One pass after another, with no communication except by synchronized batch norm."""
        with internals.without_first_exchanges(self._ddp), self._ddp.no_sync():
            (self.run_collective if self.communicates else super().run)(num_passes, run_part, smallest)

    def reduce_gradients(self) -> None:
        """Makes the gradients the sum of those of all processes; fails on all where one has no memory for it."""
        parameters = [parameter for parameter in self._ddp.module.parameters() if parameter.requires_grad]
        used = self._used(parameters)
        dense = [parameter for parameter in used if not _is_sparse(parameter)]
        with torch.no_grad():
            for (device, dtype), bucket in self._buckets.items():
                self._sum_small([p for p in dense if (p.device, p.dtype) == (device, dtype) and _is_small(p)], bucket)
            for parameter in dense:
                if not _is_small(parameter):
                    self._sum(parameter.grad)
            for parameter in used:
                if _is_sparse(parameter):
                    self._sum_sparse(parameter)

    def _used(self, parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Parameters that have a gradient somewhere, and by now everywhere."""
        kinds = [0 if p.grad is None else (_SPARSE if p.grad.is_sparse else 1) for p in parameters]
        both = self.agree(kinds + [-kind for kind in kinds])
        least, greatest = both[: len(kinds)], [-kind for kind in both[len(kinds) :]]
        if least != greatest:
            self.together(lambda: _complete(parameters, greatest))
        return [parameter for parameter, kind in zip(parameters, greatest, strict=True) if kind]

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        surely(partial(dist.all_reduce, tensor, group=self.group), self.group)

    def _sum(self, tensor: torch.Tensor | None) -> None:
        assert tensor is not None
        if tensor.is_contiguous():
            self._all_reduce(tensor)
            return
        # Gradients in another memory format are summed as they lie in memory: it is the same everywhere.
        is_dense = bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
        flat = torch.as_strided(tensor, (tensor.numel(),), (1,)) if is_dense else tensor.contiguous()
        self._all_reduce(flat)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat)

    def _sum_small(self, parameters: list[torch.nn.Parameter], bucket: torch.Tensor) -> None:
        start = 0
        while start < len(parameters):
            end, length = start, 0
            while end < len(parameters) and length + parameters[end].numel() <= len(bucket):
                length += parameters[end].numel()
                end += 1
            gradients = [p.grad for p in parameters[start:end] if p.grad is not None]
            views = list(bucket[:length].split([gradient.numel() for gradient in gradients]))
            for view, gradient in zip(views, gradients, strict=True):
                view.view(gradient.shape).copy_(gradient)
            self._all_reduce(bucket[:length])
            for view, gradient in zip(views, gradients, strict=True):
                gradient.copy_(view.view(gradient.shape))
            start = end

    def _sum_sparse(self, parameter: torch.nn.Parameter) -> None:
        """Gathers the rows of all processes; each process adds up equal ones in the same order."""
        own: list[torch.Tensor] = []
        gathered: list[torch.Tensor] = []

        def coalesce() -> None:
            assert parameter.grad is not None
            parameter.grad = parameter.grad.coalesce()

        def allocate() -> None:
            assert parameter.grad is not None
            for rows in (parameter.grad.indices().t(), parameter.grad.values()):
                own.append(rows.new_zeros((most, *rows.shape[1:])))
                own[-1][: len(rows)] = rows
                gathered.append(rows.new_empty((most * self.num_ranks, *rows.shape[1:])))

        def add_up() -> None:
            kept = torch.cat([torch.arange(count) + rank * most for rank, count in enumerate(counts)])
            indices, values = (rows[kept.to(parameter.device)] for rows in gathered)
            # They are indices of the very same parameter elsewhere.
            summed = torch.sparse_coo_tensor(indices.t(), values, parameter.shape, check_invariants=False)
            parameter.grad = summed.coalesce()

        self.together(coalesce)
        assert parameter.grad is not None
        counts = [0] * self.num_ranks
        counts[self.rank] = -len(parameter.grad.values())
        counts = [-count for count in self.agree(counts)]
        most = max(counts)
        if most:
            self.together(allocate)
            # Its name since 2.13, where the older one warns.
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            for part, whole in zip(own, gathered, strict=True):
                surely(partial(gather, whole, part, group=self.group), self.group)
            self.together(add_up)


def _complete(parameters: list[torch.nn.Parameter], kinds: list[int]) -> None:
    """Gives parameters that lack a gradient one of zeros, of the kind that the other processes have."""
    for parameter, kind in zip(parameters, kinds, strict=True):
        if parameter.grad is None and kind:
            layout = torch.sparse_coo if kind == _SPARSE else torch.strided
            parameter.grad = torch.zeros_like(parameter, layout=layout)
        elif kind == _SPARSE and not _is_sparse(parameter):
            assert parameter.grad is not None
            parameter.grad = parameter.grad.to_sparse(1)


def _is_small(parameter: torch.nn.Parameter) -> bool:
    return parameter.numel() * parameter.element_size() <= BUCKET_BYTES // 4


def _is_sparse(parameter: torch.nn.Parameter) -> bool:
    return parameter.grad is not None and parameter.grad.is_sparse

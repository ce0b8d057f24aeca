"""Processes that hold a copy of the model each: `DistributedDataParallel`.

DDP sums gradients while the backward pass runs, and broadcasts buffers in the forward pass: one process that runs out
of memory there leaves the others waiting. So no pass communicates: all run under `no_sync`, the buffers are broadcast
before the first of them, and gradients are summed after a vote has told that all processes have theirs. What it costs
is that the sum no longer overlaps with the backward pass. Communication hooks of DDP (compressed gradients) are not
run: a sum is a sum.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from memfit.adapters.torch.guarding.ghost import Accompanied
from memfit.adapters.torch.guarding.meeting import Meeting, surely

BUCKET_BYTES = 4 << 20
"""Small gradients are summed together, in a buffer of this size; larger ones by themselves, where they are."""

_SPARSE = 2


class DataParallel:
    """The processes of a `DistributedDataParallel` model.

    Args:
        model: the wrapped model.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
        device = parameters[0].device if parameters else torch.device("cpu")
        self._meeting = Meeting(model.process_group, device, most=max(64, 2 * len(parameters)))
        self.num_ranks = self._meeting.num_ranks
        self.is_first = self._meeting.rank == 0
        # Memory may be short when gradients are summed, so what that needs is held from the beginning.
        self._buckets = {
            (parameter.device, parameter.dtype): torch.empty(0, device=parameter.device, dtype=parameter.dtype)
            for parameter in parameters
        }
        for device, dtype in self._buckets:
            self._buckets[device, dtype] = torch.empty(
                self._bucket_length(parameters, device, dtype), device=device, dtype=dtype
            )
        # Only synchronized batch norm communicates within a pass.
        self.communicates = any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules())
        self._accompanied = Accompanied(self._meeting, model, _nothing, _nothing) if self.communicates else None

    @staticmethod
    def _bucket_length(parameters: list[torch.nn.Parameter], device: torch.device, dtype: torch.dtype) -> int:
        small = [
            parameter.numel()
            for parameter in parameters
            if (parameter.device, parameter.dtype) == (device, dtype) and _is_small(parameter)
        ]
        return min(sum(small), BUCKET_BYTES // dtype.itemsize)

    def begin(self) -> None:
        """Broadcasts the buffers, as DDP's forward pass would.

        Raises:
            ValueError: the model is used in a `Join`.
        """
        model = self._model
        if model._join_config.enable:
            raise ValueError(
                "the guard was given a DistributedDataParallel model within its `join` context, which expects each "
                "forward pass to communicate. Leave `join` out: give each process as many batches as the others."
            )
        if torch.is_grad_enabled():
            # Due where passes have run before the guard was made; it communicates, so it may not wait for a pass.
            model.reducer._rebuild_buckets()
        # The older name is that of releases before 2.13.
        broadcasts = getattr(model, "forward_sync_buffers", None)
        broadcasts = getattr(model, "broadcast_buffers", True) if broadcasts is None else broadcasts
        if broadcasts and any(True for _ in model.module.buffers()):
            model._sync_buffers()

    @contextmanager
    def passes(self) -> Iterator[None]:
        """In this context the model's passes don't communicate."""
        model = self._model
        # The first forward pass broadcasts buffers even without synchronisation, and the first backward pass of a
        # static graph sums gradients; DDP gives a model the second attribute only where it has such a graph.
        quiet = {"require_forward_param_sync": False, "_static_graph_delay_allreduce_enqueued": True}
        kept = {name: getattr(model, name) for name in quiet if hasattr(model, name)}
        for name in kept:
            setattr(model, name, quiet[name])
        try:
            with model.no_sync():
                yield
        finally:
            for name, value in kept.items():
                setattr(model, name, value)

    def run(self, num_passes: int, one: Callable[[int], None], smallest: Callable[[], None]) -> None:
        """One pass after another, with no communication except by synchronized batch norm."""
        with self.passes():
            if self._accompanied is not None:
                self._accompanied.run(num_passes, one, smallest)
                return
            for index in range(num_passes):
                one(index)

    def vote(self, failed: bool) -> bool:
        """Whether any process failed."""
        return self._meeting.vote(failed)

    def agree(self, numbers: list[int]) -> list[int]:
        """The least of each number over all processes."""
        return self._meeting.least(numbers)

    def total(self, weight: float) -> float:
        """The sum of the weights of all processes."""
        return self._meeting.sum(weight)

    def clip_norm(self, parameters: list[torch.nn.Parameter], norm: float) -> None:
        """Every process has all gradients, so each clips its own; none communicates."""
        torch.nn.utils.clip_grad_norm_(parameters, norm)

    def reduce_gradients(self) -> None:
        """Makes the gradients the sum of those of all processes; one that no process has stays without.

        Raises:
            torch.OutOfMemoryError: on all processes, where one has no memory for a gradient that it lacks.
        """
        parameters = [parameter for parameter in self._model.module.parameters() if parameter.requires_grad]
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
                    self._meeting.together(lambda p=parameter: _coalesce(p))  # type: ignore[misc]
                    self._sum_sparse(parameter)

    def _used(self, parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Parameters that have a gradient somewhere, and by now everywhere."""
        kinds = [0 if p.grad is None else (_SPARSE if p.grad.is_sparse else 1) for p in parameters]
        both = self._meeting.least(kinds + [-kind for kind in kinds])
        least, greatest = both[: len(kinds)], [-kind for kind in both[len(kinds) :]]
        if least != greatest:
            self._meeting.together(lambda: _complete(parameters, greatest))
        return [parameter for parameter, kind in zip(parameters, greatest, strict=True) if kind]

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        surely(partial(dist.all_reduce, tensor, group=self._meeting.group), self._meeting.group)

    def _sum(self, tensor: torch.Tensor | None) -> None:
        assert tensor is not None
        if tensor.is_contiguous():
            self._all_reduce(tensor)
            return
        # Gradients in another memory format are summed as they lie in memory: it is the same everywhere.
        flat = torch.as_strided(tensor, (tensor.numel(),), (1,)) if _is_dense_in_memory(tensor) else tensor.contiguous()
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
        found: list[torch.Tensor] = []

        def make_room() -> None:
            assert parameter.grad is not None
            indices, values = parameter.grad.indices().t(), parameter.grad.values()
            for own in (indices, values):
                padded = own.new_zeros((most, *own.shape[1:]))
                padded[: len(own)] = own
                found.extend((padded, own.new_empty((most * self.num_ranks, *own.shape[1:]))))

        def add_up() -> None:
            kept = torch.cat([torch.arange(count) + rank * most for rank, count in enumerate(counts)])
            kept = kept.to(parameter.device)
            # They are indices of the very same parameter elsewhere.
            summed = torch.sparse_coo_tensor(
                found[1][kept].t(), found[3][kept], parameter.shape, check_invariants=False
            )
            parameter.grad = summed.coalesce()

        assert parameter.grad is not None
        counts = [0] * self.num_ranks
        counts[self._meeting.rank] = -int(parameter.grad._nnz())
        counts = [-count for count in self._meeting.least(counts)]
        most = max(counts)
        if most:
            self._meeting.together(make_room)
            for own, all_of_them in (found[:2], found[2:]):
                # Its name since 2.13, where the older one warns.
                gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
                surely(partial(gather, all_of_them, own, group=self._meeting.group), self._meeting.group)
            self._meeting.together(add_up)


def _nothing() -> None:
    """Modules that keep no state of a pass need nothing before the next."""


def _complete(parameters: list[torch.nn.Parameter], kinds: list[int]) -> None:
    """Gives parameters that lack a gradient one of zeros, of the kind that the other processes have."""
    for parameter, kind in zip(parameters, kinds, strict=True):
        if parameter.grad is None and kind:
            if kind == _SPARSE:
                parameter.grad = torch.zeros_like(parameter, layout=torch.sparse_coo)
            else:
                parameter.grad = torch.zeros_like(parameter)
        elif kind == _SPARSE and not _is_sparse(parameter):
            assert parameter.grad is not None
            parameter.grad = parameter.grad.to_sparse(1)


def _coalesce(parameter: torch.nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.coalesce()


def _is_small(parameter: torch.nn.Parameter) -> bool:
    return parameter.numel() * parameter.element_size() <= BUCKET_BYTES // 4


def _is_sparse(parameter: torch.nn.Parameter) -> bool:
    return parameter.grad is not None and parameter.grad.is_sparse


def _is_dense_in_memory(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))

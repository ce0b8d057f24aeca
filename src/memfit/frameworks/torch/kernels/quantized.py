"""bitsandbytes on a simulated device: quantised weights, optimizers with 8-bit and with paged state.

The library's own Python code runs, so that states, saved tensors and dequantised copies are those of the installed
release. Only what it hands over to C++ and CUDA is stated here, by its `functional.py` and `backends/cuda/ops.py` (0.46
to 0.50; earlier releases have no operators): what kernels allocate inside, and memory that CUDA manages.

A paged state is allocated with cudaMallocManaged: its pages are on the device while there is room, and the driver moves
them to the host when others ask for that room. It is no part of what the device must provide, but of what the host
must.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from types import ModuleType
from typing import Any

import torch

from memfit.core.device import Device
from memfit.core.patching import Replacement, replaced
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.kernels.fallbacks import Report
from memfit.frameworks.torch.shapes.device_labels import DeviceLabels
from memfit.frameworks.torch.shapes.imports import on_import
from memfit.frameworks.torch.shapes.patching import in_extension
from memfit.frameworks.torch.shapes.shapes import META, Operator, size_bytes

LIBRARY = "bitsandbytes"
PAGED_STATE = "paged-state"
OUTLIERS = "outlier-columns"
# Up to so many rows a kernel multiplies by 4-bit weights without dequantising them; beyond so many none does.
_FUSED_ROWS, _MOST_FUSED_ROWS = 4, 1536

# What an operator does, made of other operators; NotImplemented: it allocates its outputs only.
Composition = Callable[..., Any]
_HOST = internals.DispatchKeySet(internals.DispatchKey.CPU)


class Quantized:
    """bitsandbytes while it is simulated on `device`; `is_on` says whether this thread is."""

    def __init__(self, device: Device, labels: DeviceLabels, report: Report, is_on: Callable[[], bool]) -> None:
        self._capability = device.capability or (8, 0)
        self._num_multiprocessors = device.num_multiprocessors or 0
        self._labels = labels
        self._report = report
        self._is_on = is_on
        self.managed_bytes = 0
        """Memory that CUDA manages, allocated so far: nothing ever frees it."""

    def compositions(self, *, on_cuda: bool) -> dict[str, Composition]:
        """What operators of the library allocate beside their outputs, by name."""
        # Registered for any device.
        common = {f"{LIBRARY}::{name}": _own_code for name in ("int8_scaled_mm", "int8_vectorwise_dequant")}
        if not on_cuda:
            names = ("int8_linear_matmul", "int8_mm_dequant", "gemm_4bit", "int8_mixed_scaled_mm")
            updates = ("optimizer_update_32bit", "optimizer_update_8bit_blockwise")
            return common | {f"{LIBRARY}::{name}": _own_code for name in (*names, *updates)}
        return {
            **common,
            f"{LIBRARY}::gemm_4bit": self._product_of_4bit,
            f"{LIBRARY}::int8_mm_dequant": _dequantized_product,
            f"{LIBRARY}::int8_vectorwise_quant": self._quantized_rows,
            f"{LIBRARY}::int8_double_quant": self._quantized_twice,
            f"{LIBRARY}::int8_mixed_scaled_mm": _mixed_product,
        }

    @contextmanager
    def running(self) -> Iterator[None]:
        """Equips the library while this lasts, however late it is imported; its own registers are restored."""
        with ExitStack() as stack:

            def equip(module: ModuleType) -> None:
                stack.enter_context(replaced(self._replacements(module)))
                pages = module.GlobalPageManager.get_instance().paged_tensors
                stack.callback(pages.__setitem__, slice(None), list(pages))
                _restore_later(stack, module.name2qmap)
                # Tables of codes are kept on the first device that needs them.
                module.name2qmap.clear()

            def restore(module: ModuleType) -> None:
                # It learns by their positions which parameters of an optimizer have states of 32 bits.
                manager = module.GlobalOptimManager.get_instance()
                for known in (manager.pid2config, manager.index2config):
                    _restore_later(stack, known)

            late = {f"{LIBRARY}.functional": equip, f"{LIBRARY}.optim.optimizer": restore}
            stack.enter_context(on_import({LIBRARY: _import_plainly}, late))
            yield

    def _replacements(self, module: Any) -> list[Replacement]:
        plain_paged, plain_fill, plain_prefetch = module.get_paged, module.fill, module.prefetch_tensor

        def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
            if not self._is_on():
                return plain_paged(*shape, dtype=dtype, device=device)  # type: ignore[no-any-return]
            with internals.outside_simulation():
                state: Any = torch.empty(shape, dtype=dtype, device=META)
                self._labels.mark(state, torch.device("cpu"))
                self.managed_bytes += size_bytes(state)
            state.is_paged, state.page_deviceid = True, device.index
            text = "paged optimizer state is managed memory: on the device while there is room, else on the host"
            self._report(PAGED_STATE, f"{text}; it is counted as the host's")
            return state  # type: ignore[no-any-return]

        def fill(A: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if not self._is_on():
                plain_fill(A, *args, **kwargs)

        def prefetch_tensor(A: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if not self._is_on():
                plain_prefetch(A, *args, **kwargs)

        return [
            Replacement(module, "get_paged", get_paged),
            Replacement(module, "fill", fill),
            Replacement(module, "prefetch_tensor", prefetch_tensor),
        ]

    def _product_of_4bit(self, func: Operator, data: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Weights are dequantised for the product, but not for a few rows."""
        shape, block_size = args[1], args[3]
        rows = data.numel() // max(1, data.shape[-1])
        if shape[1] % block_size == 0 and self._is_fused(data.dtype, rows, *shape):
            return NotImplemented
        return _own_code(func, data, *args, **kwargs)

    def _is_fused(self, dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> bool:
        """Whether, by the library's own table, a kernel multiplies by 4-bit weights as they are."""
        if rows <= _FUSED_ROWS or rows > _MOST_FUSED_ROWS:
            return rows <= _FUSED_ROWS
        module = _cuda_backend()
        table = getattr(module, "_gemm_4bit_use_custom_cuda", None)
        if table is None or not self._num_multiprocessors:
            return False
        properties = (self._num_multiprocessors, *self._capability)
        with replaced([Replacement(module, "_gpu_dispatch_props", lambda index: properties)]):
            # Past its cache, which knows no other device.
            return bool(table.__wrapped__(0, dtype, rows, outputs, inputs))

    def _quantized_rows(self, func: Operator, data: torch.Tensor, threshold: float = 0.0) -> Any:
        """Rows as int8; columns with outliers are looked for with a copy of the magnitudes."""
        statistics = data.new_empty(data.numel() // data.shape[-1], dtype=torch.float32)
        out = torch.empty_like(data, dtype=torch.int8, memory_format=torch.contiguous_format)
        return out, statistics, self._outliers(data, threshold) if threshold > 0 else None

    def _outliers(self, data: torch.Tensor, threshold: float) -> torch.Tensor:
        outliers = data.abs() >= threshold
        upper = f"columns with values beyond {threshold:g}, which stay in 16 bits, depend on data: none assumed"
        self._report(OUTLIERS, upper)
        del outliers
        return data.new_empty(0, dtype=torch.int64)

    def _quantized_twice(self, func: Operator, data: torch.Tensor, threshold: float = 0.0) -> Any:
        """Rows and columns as int8, as weights that are trained in 16 bits need both."""
        rows, row_statistics, columns = torch.ops.bitsandbytes.int8_vectorwise_quant.default(data, threshold)
        magnitudes = data.abs().view(-1, data.shape[-1])
        mask = magnitudes >= threshold if threshold > 0 else None
        if mask is not None:
            magnitudes.masked_fill_(mask, 0.0)
        column_statistics = magnitudes.amax(dim=0).float()
        del magnitudes
        if mask is not None:
            data = data.masked_fill(mask, 0.0)
        quantized = torch.round(data.mul(127.0) / column_statistics.unsqueeze(0)).to(torch.int8)
        return rows, quantized, row_statistics, column_statistics.flatten().float(), columns


def _restore_later(stack: ExitStack, known: dict[Any, Any]) -> None:
    stack.callback(known.update, dict(known))
    stack.callback(known.clear)


def _own_code(func: Operator, *args: Any, **kwargs: Any) -> Any:
    """The library's Python kernel for any device, run on shapes."""
    return func.redispatch(_HOST, *args, **kwargs)


def _dequantized_product(func: Operator, data: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Sums of int8 products in float16, which is what the kernel writes, and then in the dtype wanted."""
    given = dict(zip(("row_stats", "col_stats", "dtype", "bias"), args, strict=False)) | kwargs
    out = torch.empty_like(data, dtype=torch.float16)
    return out.to(given.get("dtype") or torch.float16)


def _mixed_product(
    func: Operator,
    data: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    row_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The product without columns of outliers."""
    bias = args[1] if len(args) > 1 else kwargs.get("bias")
    product = torch.ops.bitsandbytes.int8_scaled_mm.default
    return (
        product(rows, weights, row_scales, weight_scales, bias=bias, dtype=data.dtype),
        data.new_empty(0),
    )


@cache
def _cuda_backend() -> Any:
    """The library's module for CUDA, which can be read without a GPU; None where this release has none."""
    raw_stream = in_extension({"_cuda_getCurrentRawStream": None})
    with suppress(ImportError, AttributeError), internals.outside_simulation(), replaced(raw_stream):
        return importlib.import_module(f"{LIBRARY}.backends.cuda.ops")
    return None


def _import_plainly() -> None:
    """Loads the library as a machine without a GPU does: it would look for CUDA's libraries, and may not find them."""
    hidden = [
        Replacement(torch.cuda, "is_available", lambda: False),
        Replacement(torch.cuda, "device_count", lambda: 0),
        # It compiles kernels for other devices.
        Replacement(torch, "compile", lambda function=None, **options: function),
    ]
    # Tables that it computes must be real.
    with internals.outside_simulation(), replaced(hidden):
        importlib.import_module(LIBRARY)

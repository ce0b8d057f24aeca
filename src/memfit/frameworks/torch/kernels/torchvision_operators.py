"""Lets torchvision be imported beside a build of PyTorch that its compiled operators don't match.

torchvision's Python code refers to operators of its extension module while it is imported. Where the extension can't be
loaded, the import fails although models need none of them. Declaring the operators is enough; those that detectors
use get kernels, of the simulated device and of the processor, so that plain code that runs detectors works too.
"""

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    "roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) "
    "-> (Tensor, Tensor)",
    "_roi_align_backward(Tensor grad, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "SymInt batch_size, SymInt channels, SymInt height, SymInt width, int sampling_ratio, bool aligned) -> Tensor",
    "ps_roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio) -> (Tensor, Tensor)",
    "ps_roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) "
    "-> (Tensor, Tensor)",
)
_library: torch.library.Library | None = None


def define_missing_operators() -> None:
    """Imports torchvision, where it is installed, with its operators declared if it fails for the lack of them."""
    try:
        mended = import_with_operators(lambda: importlib.import_module("torchvision"))
    except ImportError:
        return
    if mended:
        warnings.warn(
            f"torchvision's compiled operators don't match this build of PyTorch ({torch.__version__}). memfit goes on "
            "without them, but a script that imports torchvision fails in this environment: install the build of "
            "torchvision that matches PyTorch's.",
            RuntimeWarning,
            stacklevel=2,
        )


def import_with_operators(execute: Callable[[], object]) -> bool:
    """Calls `execute`, which runs torchvision's own code, and once more with its operators declared if they lack.

    True where they did.
    """
    global _library
    try:
        execute()
    except RuntimeError as error:
        if "torchvision::" not in str(error) or _library is not None:
            raise
    else:
        return False
    package = vars(sys.modules.get("torchvision", sys))
    for name in [n for n in sys.modules if n.startswith("torchvision.")]:
        # What the package still had as an attribute would not be imported again, and be missing here.
        if package.get(name.removeprefix("torchvision.")) is sys.modules[name]:
            del package[name.removeprefix("torchvision.")]
        del sys.modules[name]
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        _library.define(schema)
    _library.impl("nms", _suppress, "CPU")
    _define_roi_align(_library)
    execute()

    # Now it has; its detection models would otherwise refuse, or go another way that takes far more memory.
    for name in ("torchvision.extension", "torchvision.ops.roi_align"):
        vars(sys.modules[name])["_has_ops"] = lambda: True
    return True


def _suppress(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Numbers of the boxes that overlap none with a higher score by more than `threshold`, best first."""
    overlaps = sys.modules["torchvision.ops.boxes"].box_iou(boxes, boxes)
    kept: list[int] = []
    suppressed = torch.zeros(len(boxes), dtype=torch.bool)
    for number in scores.argsort(descending=True, stable=True).tolist():
        if not suppressed[number]:
            kept.append(number)
            suppressed |= overlaps[number] > threshold
    return torch.tensor(kept, dtype=torch.int64)


def _define_roi_align(library: torch.library.Library) -> None:
    """Shapes and gradient of `roi_align`, by which detection models cut regions out of feature maps."""
    operators = torch.ops.torchvision

    def forward(data: Any, rois: Any, scale: float, height: int, width: int, ratio: int, aligned: bool) -> Any:
        return data.new_empty((rois.shape[0], data.shape[1], height, width))

    def backward(grad: Any, rois: Any, scale: float, height: int, width: int, batch: int, *rest: int) -> Any:
        return grad.new_empty((batch, *rest[:3]))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        data, rois, *ctx.options = inputs
        ctx.save_for_backward(rois)
        ctx.shape = data.shape

    def differentiate(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        scale, height, width, ratio, aligned = ctx.options
        (rois,) = ctx.saved_tensors
        back = operators._roi_align_backward(grad, rois, scale, height, width, *ctx.shape, ratio, aligned)
        return back, None, None, None, None, None, None

    def on_host(*arguments: Any) -> Any:
        # torchvision's own code in Python, as it is before it is compiled.
        return inspect.unwrap(sys.modules["torchvision.ops.roi_align"]._roi_align)(*arguments)

    def backward_on_host(grad: Any, rois: Any, scale: float, height: int, width: int, batch: int, *rest: Any) -> Any:
        with torch.enable_grad():
            data = grad.new_zeros((batch, *rest[:3])).requires_grad_()
            made = on_host(data, rois, scale, height, width, *rest[3:])
            return torch.autograd.grad(made, data, grad)[0]

    library.impl("roi_align", forward, "Meta")
    library.impl("roi_align", on_host, "CPU")
    library.impl("_roi_align_backward", backward, "Meta")
    library.impl("_roi_align_backward", backward_on_host, "CPU")
    torch.library.register_autograd("torchvision::roi_align", differentiate, setup_context=keep, lib=library)

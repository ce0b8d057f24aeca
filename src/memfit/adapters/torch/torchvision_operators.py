"""Lets torchvision be imported beside a build of PyTorch that its compiled operators don't match.

torchvision's Python code refers to operators of its extension module while it is imported. Where the extension can't be
loaded, the import fails although models need none of them. Declaring the operators, without any kernel, is enough.
"""

import importlib
import sys
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
    """Declares torchvision's operators if importing it fails for the lack of them."""
    global _library
    if _library is not None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    except ImportError:
        return
    else:
        return
    for name in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
        del sys.modules[name]
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        _library.define(schema)
    _define_roi_align(_library)
    importlib.import_module("torchvision")

    # Now it has; its detection models would otherwise refuse, or go another way that takes far more memory.
    for name in ("torchvision.extension", "torchvision.ops.roi_align"):
        vars(sys.modules[name])["_has_ops"] = lambda: True


def _define_roi_align(library: torch.library.Library) -> None:
    """Shapes and gradient of `roi_align`, by which detection models cut regions out of feature maps."""
    operators = torch.ops.torchvision

    def forward(data: Any, rois: Any, scale: float, height: int, width: int, ratio: int, aligned: bool) -> torch.Tensor:
        made: torch.Tensor = data.new_empty((rois.shape[0], data.shape[1], height, width))
        return made

    def backward(grad: Any, rois: Any, scale: float, height: int, width: int, batch: int, *rest: int) -> torch.Tensor:
        made: torch.Tensor = grad.new_empty((batch, *rest[:3]))
        return made

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        data, rois, *ctx.options = inputs
        ctx.save_for_backward(rois)
        ctx.shape = data.shape

    def differentiate(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        scale, height, width, ratio, aligned = ctx.options
        (rois,) = ctx.saved_tensors
        back = operators._roi_align_backward(grad, rois, scale, height, width, *ctx.shape, ratio, aligned)
        return back, None, None, None, None, None, None

    library.impl("roi_align", forward, "Meta")
    library.impl("_roi_align_backward", backward, "Meta")
    torch.library.register_autograd("torchvision::roi_align", differentiate, setup_context=keep, lib=library)

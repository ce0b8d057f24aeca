"""Lets torchvision be imported beside a build of PyTorch that its compiled operators don't match.

torchvision's Python code refers to operators of its extension module while it is imported. Where the extension can't be
loaded, the import fails although models need none of them. Declaring the operators, without any kernel, is enough.
"""

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    "roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) "
    "-> (Tensor, Tensor)",
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
        import torchvision  # noqa: F401 - imported to see whether it can be
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    except ImportError:
        return
    else:
        return
    import sys

    for name in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
        del sys.modules[name]
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        _library.define(schema)

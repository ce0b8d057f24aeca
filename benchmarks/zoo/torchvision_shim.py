"""Lets torchvision be imported beside a build of torch that its compiled operators do not match.

The wheel of torchvision on PyPI is compiled against the CUDA build of torch. Beside the CPU build its library of
operators does not load, and the import then fails because the Python side registers shape functions for operators that
nobody defined. Defining their signatures first is enough for every model that never calls them.
"""

import importlib.util

import torch

SIGNATURES = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    "_roi_align_backward(Tensor grad, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "SymInt batch_size, SymInt channels, SymInt height, SymInt width, int sampling_ratio, bool aligned) -> Tensor",
    "roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) "
    "-> (Tensor, Tensor)",
    "ps_roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio) -> (Tensor, Tensor)",
    "ps_roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) "
    "-> (Tensor, Tensor)",
    "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, "
    "SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, "
    "SymInt offset_groups, bool use_mask) -> Tensor",
)

_library: torch.library.Library | None = None


def install() -> None:
    """Define torchvision's operators unless its own library provides them; call before importing torchvision."""
    global _library
    if _library is not None or importlib.util.find_spec("torchvision") is None or _loads():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for signature in SIGNATURES:
        library.define(signature)
    _library = library


def _loads() -> bool:
    """Whether torchvision imports as it is."""
    try:
        import torchvision  # noqa: F401
    except (RuntimeError, ImportError):
        return False
    return True

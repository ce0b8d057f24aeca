"""Facts about a step that decide which moves make sense: what `Profile.features` lists."""

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from memfit.adapters.torch.fitting.chunked_loss import SMALLEST_VOCABULARY
from memfit.adapters.torch.recorder import Recorder
from memfit.adapters.torch.shapes import HALVES, Operator, tensors
from memfit.core.timeline import Category, Phase

_FUSABLE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_DROPOUTS = {"aten::native_dropout", "aten::bernoulli_", "aten::bernoulli"}
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::linear", "aten::bmm"}
# What stands between a linear layer and its cross entropy without computing anything new.
_CARRYING = {"aten::_to_copy", "aten::clone", "aten::copy", "aten::slice_copy", "aten::index"}


class FeatureWatch:
    """Recognises features by the operators of a step.

    Args:
        recorder: knows the blocks.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.found: set[str] = set()
        self._recorder = recorder
        self._products: set[int] = set()

    def ran(self, func: Operator, args: tuple[Any, ...], out: Any, phase: Phase) -> None:
        """Looks at one operator."""
        name = func._schema.name
        if phase is Phase.OPTIMIZER:
            if "_fused_" in name:
                self.found.add("fused")
                # Fused updates count their steps by a foreach kernel.
                self.found.discard("foreach")
            elif "_foreach_" in name and "fused" not in self.found:
                self.found.add("foreach")
        elif phase is Phase.FORWARD:
            if "convolution" in name:
                self.found.add("convolution")
            elif name in _DROPOUTS:
                self.found.add("dropout")
            elif "batch_norm" in name and _over_the_batch(args):
                self.found.add("batch-norm")
            self._follow_products(name, args, out)

    def _follow_products(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        if name in _PRODUCTS and isinstance(out, torch.Tensor):
            self._add(out)
            return
        source = next(tensors(args), None)
        if source is None or source.layout is not torch.strided:
            return
        block = self._recorder.block_of(source)
        if block is None:
            return
        if name == "aten::_to_copy" and self._recorder.categories[block] is Category.PARAMETER:
            if out.dtype in HALVES and source.dtype not in HALVES:
                self.found.add("autocast")
        elif block in self._products:
            if name in _CARRYING:
                self._add(out)
            elif name == "aten::_log_softmax" and source.shape[args[1]] >= SMALLEST_VOCABULARY:
                self.found.add("cross-entropy")

    def _add(self, tensor: torch.Tensor) -> None:
        block = self._recorder.block_of(tensor)
        if block is not None:
            self._products.add(block)


def _over_the_batch(args: tuple[Any, ...]) -> bool:
    """Whether a batch norm computes statistics over samples; those of single images come as one large sample."""
    tensor = next(tensors(args), None)
    return tensor is not None and tensor.shape[0] > 1 and any(value is True for value in args[5:6])


def features_of(model: torch.nn.Module, optimizer: Any) -> set[str]:
    """What can be read off the objects themselves."""
    found: set[str] = set()
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.training:
            found.add("batch-norm")
        elif isinstance(module, _DropoutNd) and module.training and module.p > 0:
            found.add("dropout")
        elif isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            found.add("sparse-gradients")
        elif isinstance(module, torch.nn.Linear):
            found.add("linear")
        elif isinstance(module, _ConvNd) and module.weight.dim() == 4 and not _is_channels_last(module.weight):
            found.add("channels-first")
    names = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    if len(set(names)) < len(names):
        found.add("shared-parameters")
    if any(not parameter.requires_grad for parameter in model.parameters()):
        found.add("frozen-parameters")
    if optimizer is not None and any(group.get("fused") for group in optimizer.param_groups):
        found.add("fused")
    elif type(optimizer) in _FUSABLE:
        found.add("fusable")
    return found | _optimizer_features(optimizer)


def _is_channels_last(weight: torch.Tensor) -> bool:
    return weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


def _optimizer_features(optimizer: Any) -> set[str]:
    found: set[str] = set()
    is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    if is_adam and not any(group.get("amsgrad") for group in optimizer.param_groups):
        found.add("adam")
    if isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, torch.optim.LBFGS):
        found.add("steppable")
    return found

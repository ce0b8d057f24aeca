"""PyTorch behind the interface that all frameworks share."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from memfit.core.device import Device
from memfit.core.errors import BadModel, BadOptimizer
from memfit.core.job import AUTOCASTS, PRECISIONS, Job
from memfit.core.plan import Plan
from memfit.frameworks.torch.apply.loss_function import as_loss as as_loss
from memfit.frameworks.torch.stack import installed_stack
from memfit.frameworks.torch.trace.job import OpenJob
from memfit.frameworks.torch.trace.job import own_gpu as own_gpu
from memfit.frameworks.torch.trace.trace import check_parameters

if TYPE_CHECKING:
    from memfit.frameworks.torch.guard.loop import TorchLoop

name = "torch"
title = "PyTorch"
stack = installed_stack


def open_job(job: Job, device: Device, batch_size: int | None = None) -> OpenJob:
    """The job, checked and ready to be traced, at its own batch size or the given one."""
    return OpenJob(job, device, batch_size)


def planned_job(job: Job, precision: str) -> Job:
    """The job with the precision that must be used."""
    return replace(job, precision=precision) if precision in PRECISIONS else job


def planning(tracer: OpenJob, target: Device) -> Any:
    """The step, which can be profiled as often as the planner likes."""
    # Plans need much that estimates do without.
    from memfit.frameworks.torch.trace.subject import Subject

    step = Subject(tracer)
    if tracer.job.precision is not None and tracer.job.precision not in AUTOCASTS:
        step.check_width(tracer.job.precision)
    return step


def apply(plan: Plan, model: Any, optimizer: Any) -> Any:
    """Model and optimizer, run as a plan says."""
    from memfit.frameworks.torch.apply.fitted import Fitted

    if not isinstance(model, torch.nn.Module):
        raise BadModel(f"a plan is applied to a torch.nn.Module, but {type(model).__name__} was given.")
    if isinstance(optimizer, torch.optim.Optimizer):
        check_parameters(optimizer, list(model.parameters()))
    settings = plan.settings
    wanted = (settings.kernels.value, settings.state.value, settings.step_in_backward) != ("keep", "keep", False)
    if optimizer is None and wanted:
        raise BadOptimizer("the plan changes the optimizer, but there is no optimizer. Call apply(model, optimizer).")
    return Fitted(settings, model, optimizer)


def named_job(name: str, optimizer: str, sequence_length: int | None, image_size: int | None) -> Job:
    """The usual job of a model of timm, torchvision or transformers."""
    from memfit.frameworks.torch.trace import named

    # Fails early on a name that isn't one.
    named_optimizer(optimizer)
    return named.named_job(name, optimizer, sequence_length, image_size)


def named_optimizer(name: str) -> Any:
    """A callable that makes the optimizer called `name`, or None for "none"."""
    from memfit.frameworks.torch.trace import named

    return named.named_optimizer(name)


def guarded_loop(*subject: Any, **options: Any) -> "TorchLoop":
    """The training loop of a model and its optimizer; see `TorchLoop`."""
    from memfit.frameworks.torch.guard.loop import TorchLoop

    return TorchLoop(*subject, **options)

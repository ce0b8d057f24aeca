"""What users give, made into jobs, and the adapter of the framework that runs each of them."""

import importlib
import importlib.util
import sys
from dataclasses import replace
from typing import Any

from memfit.core.adapter import Adapter
from memfit.core.device import Device
from memfit.core.errors import BadInput, MissingDependency, how_to_install
from memfit.core.job import Job
from memfit.core.progress import doing
from memfit.core.replay import AllocatorOptions
from memfit.core.stack import Stack
from memfit.estimator.estimator import Estimator


def as_job(model: Any, arguments: tuple[Any, ...], loss: Any, batch: Any, **options: Any) -> Job:
    """A job from what the caller gave: a job, a model with loss and batch by place or name, or a step of JAX.

    Options of the job that are None are left as they are.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(model, str):
        raise BadInput(
            f"a model was expected, but the text {model!r} was given. For a name: memfit.named_job({model!r})."
        )
    may_be_step = "jax" in sys.modules and callable(model) and not isinstance(model, Job)
    may_be_step = may_be_step and not is_keras_model(model) and not is_torch_module(model)
    if may_be_step and jax_adapter().is_step(model, arguments):
        if loss is not None or (batch is not None and arguments):
            raise BadInput("a step of JAX takes its arguments one after the other: memfit.estimate(step, *arguments).")
        return Job(model, None, arguments or batch, **given)
    if len(arguments) > 2:
        raise BadInput(
            f"a model is followed by loss and batch, but {len(arguments)} arguments were given. "
            "Where the first is a training step of JAX, import jax and give its arguments as arrays or shapes."
        )
    by_place = dict(zip(("loss", "batch"), arguments, strict=False))
    for name, value in (("loss", loss), ("batch", batch)):
        if value is not None and name in by_place:
            raise BadInput(f"{name} was given twice: by position and by name.")
    loss, batch = by_place.get("loss", loss), by_place.get("batch", batch)
    if isinstance(model, Job):
        if loss is not None or batch is not None:
            raise BadInput("a Job brings its own loss and batch; give either a Job or a model with loss and batch.")
        if isinstance(given.get("optimizer"), str) and adapter_of(model).name == "torch":
            given["optimizer"] = named_optimizer(given["optimizer"])
        return replace(model, **given)
    if is_keras_model(model):
        if loss is not None and batch is None:
            # memfit.estimate(model, (x, y))
            loss, batch = None, loss
        if loss is not None and is_torch_module(model):
            # Trained as a module of PyTorch, in a loop of one's own.
            return Job(model, loss, batch, **given)
        if loss is not None or given.get("optimizer") is not None:
            raise BadInput(
                "a Keras model brings its loss and optimizer from compile(); give the model and the batch only: "
                "memfit.estimate(model, batch=(x, y))."
            )
        return Job(model, None, batch, **given)
    if isinstance(given.get("optimizer"), str):
        given["optimizer"] = named_optimizer(given["optimizer"])
    if batch is None and loss is not None and not callable(loss):
        # memfit.estimate(model, batch): the model returns its loss itself.
        loss, batch = None, loss
    if loss is None:
        if batch is None:
            raise BadInput(
                "loss and batch are missing: give a function that takes (model, batch) and returns the scalar loss, "
                "and a batch; or the batch alone where the model returns its loss. Where the first is a training step "
                "of JAX, give its arguments as arrays or shapes."
            )
        loss = torch_adapter().as_loss(None)
    return Job(model, loss, batch, **given)


def is_keras_model(model: Any) -> bool:
    """True for a model of Keras, on any backend."""
    keras = sys.modules.get("keras")
    return keras is not None and hasattr(keras, "Model") and isinstance(model, keras.Model)


def is_torch_module(model: Any) -> bool:
    """True for a module of PyTorch; a Keras model on the PyTorch backend is one too."""
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "nn") and isinstance(model, torch.nn.Module)


def adapter_of(job: Job) -> Adapter:
    """The adapter of the framework that runs a job."""
    if job.loss is not None or (is_torch_module(job.model) and not is_keras_model(job.model)):
        # A model of Keras on PyTorch is a module of PyTorch, too, and a loop of one's own may train it as such.
        adapter: Adapter = torch_adapter()
    elif job.model is None or is_keras_model(job.model):
        # A turn of a loop in a script with Keras has no model that could be named.
        adapter = keras_adapter()
    else:
        adapter = jax_adapter()
    return adapter


def open_estimator(
    job: Job, device: Device, options: AllocatorOptions | None = None, batch_size: int | None = None
) -> Estimator:
    """The job, checked and ready to be estimated, at its own batch size or the given one."""
    adapter = adapter_of(job)
    if job.compile and adapter.name != "torch":
        raise BadInput(
            f"compile is for models of PyTorch, but the job runs on {adapter.title}. Leave it out: Keras compiles with "
            "model.compile(jit_compile=True), and steps of JAX are compiled as they are."
        )
    target = on_installed_stack(device, adapter.stack(), adapter.title)
    if job.set_to_none is None:
        job = replace(job, set_to_none=target.stack is None or target.stack.frees_gradients)
    with doing("opening the model"):
        tracer = adapter.open_job(job, target, batch_size)
    return Estimator(job, target, options or AllocatorOptions(), tracer, adapter.title)


def on_installed_stack(device: Device, installed: Stack | None, title: str) -> Device:
    """The device with the stack that is installed, unless it has one of its own.

    Args:
        device: the target.
        installed: of PyTorch; None where what runs on the device doesn't run on PyTorch.
        title: of what runs on it.
    """
    if installed is None and device.stack is not None:
        raise BadInput(
            f"a stack names versions of PyTorch, but {device.stack.text} was given for {title}, which doesn't run on "
            "it. Leave out the stack."
        )
    return device if device.stack is not None else replace(device, stack=installed)


def _require(package: str, title: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingDependency(f"{title} is not installed. Install it with {how_to_install(package)}.")


def require_torch() -> None:
    """Refuses to go on without PyTorch."""
    _require("torch", "PyTorch")


def torch_adapter() -> Any:
    """The adapter of PyTorch."""
    require_torch()
    from memfit.frameworks.torch import adapter

    return adapter


def require_keras() -> None:
    """Refuses to go on without Keras, or without the backend that it is set to run on."""
    _require("keras", "Keras")
    try:
        importlib.import_module("memfit.frameworks.keras.model")
    except ValueError as error:
        # Keras has no such backend; it asks the environment, then its own file of settings.
        raise BadInput(
            f"Keras can't be imported: {error}. Set KERAS_BACKEND to tensorflow, jax or torch, and install that one."
        ) from None
    except ImportError as error:
        backend = (error.name or "").partition(".")[0]
        if backend not in ("tensorflow", "jax", "torch"):
            raise
        raise MissingDependency(
            f"Keras is set to run on {backend}, which is not installed. Install it with "
            f"{how_to_install(backend)}, or set KERAS_BACKEND to one that is: tensorflow, jax or torch."
        ) from None


def keras_adapter() -> Adapter:
    """The adapter of Keras."""
    require_keras()
    from memfit.frameworks.keras import adapter

    return adapter


def jax_adapter() -> Any:
    """The adapter of JAX."""
    _require("jax", "JAX")
    from memfit.frameworks.jax import adapter

    return adapter


def named_optimizer(name: str) -> Any:
    """A callable that makes the optimizer of PyTorch called `name`, or None for "none"."""
    return torch_adapter().named_optimizer(name)


def mend_torchvision() -> None:
    """Lets torchvision be imported beside a build of PyTorch that its compiled operators don't match."""
    torch_adapter()
    from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators

    define_missing_operators()

"""Jobs from names: `timm:resnet50`, `torchvision:resnet50`, `hf:gpt2-medium`, `hf:path/to/config.json`.

Weights are never downloaded: models are built from code and configuration. The step is the usual one for the kind of
model.
"""

import importlib
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from memfit.core.errors import BadInput, BadTarget, MissingDependency, how_to_install
from memfit.core.job import OPTIMIZERS, Job
from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators

_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer] | None] = {
    "none": None,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
}


def named_optimizer(name: str) -> Callable[[Any], torch.optim.Optimizer] | None:
    """A callable that makes the optimizer called `name`, or None for "none"."""
    if name not in _OPTIMIZERS:
        raise BadInput(f"optimizer must be one of {', '.join(OPTIMIZERS)}, but {name!r} was given.")
    return _OPTIMIZERS[name]


def named_job(target: str, optimizer: str, sequence_length: int | None, image_size: int | None) -> Job:
    """The job that `target` names, with made-up batches of the given sizes or the model's own."""
    kind, _, name = target.partition(":")
    if not name or kind not in ("timm", "torchvision", "hf"):
        raise BadTarget(
            f"{target!r} names no model; write timm:NAME, torchvision:NAME, keras:NAME or hf:NAME_OR_CONFIG."
        )
    if kind == "hf":
        job = _hugging_face(name, sequence_length, image_size)
    else:
        job = _timm(name, image_size) if kind == "timm" else _torchvision(name, image_size)
    # The name says what was assumed: the class, and the size of a sample.
    return replace(job, optimizer=named_optimizer(optimizer), precision="fp32", name=f"{target} ({job.name})")


def _import(package: str) -> Any:
    try:
        define_missing_operators()
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingDependency(
            f"{package} can't be imported ({error}). Install it with {how_to_install(package)}."
        ) from None


def _nearest(name: str, known: list[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f" Did you mean {', '.join(close)}?" if close else ""


def _timm(name: str, image_size: int | None) -> Job:
    timm = _import("timm")
    if not timm.is_model(name.split(".")[0]):
        raise BadTarget(f"timm has no model {name!r}.{_nearest(name, timm.list_models())}")
    config = timm.get_pretrained_cfg(name)
    default = config.input_size[-1] if config is not None else 224
    size = image_size or default

    def build() -> Any:
        # Many vision transformers are built for one image size; convolutional networks don't know the argument.
        try:
            return timm.create_model(name, **({} if size == default else {"img_size": size}))
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            return timm.create_model(name)

    return _classifier(build, size)


def _torchvision(name: str, image_size: int | None) -> Job:
    models = _import("torchvision").models
    if name not in models.list_models(module=models):
        raise BadTarget(f"torchvision has no classifier {name!r}.{_nearest(name, models.list_models(module=models))}")
    size = image_size or (299 if name == "inception_v3" else 224)
    return _classifier(lambda: models.get_model(name, weights=None), size)


def _classifier(build: Callable[[], Any], size: int) -> Job:
    """The job of a classifier of images."""

    def images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = torch.empty(count, 3, size, size, device="meta")
        return pixels, torch.empty(count, dtype=torch.int64, device="meta")

    def loss(model: Any, batch: Any) -> torch.Tensor:
        pixels, labels = batch
        output = model(pixels)
        output = getattr(output, "logits", output)
        output = output[0] if isinstance(output, list | tuple) else output
        return torch.nn.functional.cross_entropy(output, labels)

    return Job(model=build, loss=loss, batch=images, name=f"{size} x {size} pixels")


def _hugging_face(name: str, sequence_length: int | None, image_size: int | None) -> Job:
    transformers = _import("transformers")
    model_class, config = _hugging_face_class(transformers, name)
    text = getattr(config, "get_text_config", lambda: config)()
    fields = ("max_position_embeddings", "n_positions", "max_target_positions", "max_source_positions", "max_seq_len")
    positions = [getattr(text, field, None) for field in fields]
    longest = next((value for value in positions if isinstance(value, int) and value > 0), None)
    if sequence_length is not None and longest is not None and sequence_length > longest:
        raise BadInput(
            f"a sequence length of {sequence_length} was given, but hf:{name} has {longest} positions. "
            "Give a shorter one, or a config.json with more."
        )
    length = sequence_length or min(longest or 512, 512)

    def build() -> Any:
        model = model_class(config)
        if getattr(model, "loss_type", "") is None:
            # What transformers falls back to, with a warning.
            model.loss_type = "ForCausalLM"
        return model

    sample, batch = _hugging_face_batch(model_class, config, length, image_size)
    named = "" if model_class.__name__ == name else f"{model_class.__name__}, "
    return Job(model=build, loss=_hugging_face_loss, batch=batch, name=named + sample)


def _is_contrastive(model_class: Any) -> bool:
    """True for a model that is trained on pairs of a text and an image, as CLIP is."""
    return {"input_ids", "pixel_values", "return_loss"} <= inspect.signature(model_class.forward).parameters.keys()


def _hugging_face_class(transformers: Any, name: str) -> tuple[Any, Any]:
    """(model class, configuration) of a class name, a model of the Hub, a model type, or a configuration file."""
    model_class: Any = getattr(transformers, name, None)
    if getattr(model_class, "config_class", None) is not None:
        config = model_class.config_class()
    else:
        model_class = None
        try:
            if os.path.exists(name):
                config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
            else:
                config = hub_config(transformers, name)
        except (OSError, ValueError, KeyError) as error:
            raise BadTarget(f"{name} is not a configuration that transformers can read: {error}") from None
    try:
        config = config or transformers.AutoConfig.for_model(name)
    except ValueError:
        classes = (n for n in dir(transformers) if "For" in n or n.endswith(("Model", "LM")))
        raise BadTarget(
            f"{name!r} is neither a model class of transformers, nor a model type, nor a path to a config.json, nor a "
            f"model of the Hub that memfit knows ({len(hub_names())} names) or that is in its local cache. Nothing is "
            "downloaded: for another model of the Hub give the path of its config.json."
            f"{_nearest(name, [*hub_names(), *transformers.CONFIG_MAPPING.keys(), *classes])}"
        ) from None
    if config.is_encoder_decoder:
        # Tokens that a default configuration leaves to the pretrained one; memory doesn't depend on them.
        for token in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, token, None) is None:
                setattr(config, token, 0)
    architectures = getattr(config, "architectures", None) or []
    named = next((getattr(transformers, a) for a in architectures if hasattr(transformers, a)), None)
    return model_class or named or _usual_class(transformers, config), config


def _usual_class(transformers: Any, config: Any) -> Any:
    """The class that a model of this type is usually trained as."""
    for task in ("SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION"):
        mapping = getattr(transformers, f"MODEL_FOR_{task}_MAPPING", {})
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, list | tuple) else found
    return transformers.MODEL_MAPPING[type(config)]


def _hugging_face_batch(
    model_class: Any, config: Any, length: int, image_size: int | None
) -> tuple[str, Callable[[int], Any]]:
    """(the size of a sample in words, what makes a batch of so many)."""
    main_input = str(getattr(model_class, "main_input_name", None) or getattr(config, "main_input_name", "input_ids"))
    shapes: dict[str, tuple[int, ...]] = {}
    sizes: list[str] = []
    if main_input == "pixel_values" or _is_contrastive(model_class):
        side: Any = image_size or getattr(getattr(config, "vision_config", config), "image_size", 224)
        side = int(side[0] if isinstance(side, list | tuple) else side)
        shapes["pixel_values"] = (getattr(config, "num_channels", 3), side, side)
        sizes.append(f"{side} x {side} pixels")
    if main_input == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        # The spectrogram of a fixed time, whose frames a convolution halves, as Whisper's is.
        frames = 2 * config.max_source_positions
        shapes["input_features"] = (config.num_mel_bins, frames)
        sizes += [f"{frames} frames of sound", f"{length} tokens"]
    elif main_input in ("input_features", "input_values"):
        raise BadTarget(
            f"{model_class.__name__} takes {main_input}, whose shape its configuration doesn't fix. "
            "Write a file with a function that returns a memfit.Job and name it FILE.py:function."
        )
    elif main_input != "pixel_values":
        shapes["input_ids"] = (length,)
        sizes.append(f"{length} tokens")
    kinds = ("CausalLM", "MaskedLM", "LMHead", "ConditionalGeneration", "MTModel", "TokenClassification")
    if any(kind in model_class.__name__ for kind in kinds):
        shapes["labels"] = (length,)
    elif any(kind in model_class.__name__ for kind in ("SequenceClassification", "ImageClassification")):
        shapes["labels"] = ()

    def make(count: int) -> dict[str, torch.Tensor]:
        return {
            name: torch.empty(
                count, *shape, dtype=torch.int64 if name in ("input_ids", "labels") else None, device="meta"
            )
            for name, shape in shapes.items()
        }

    return ", ".join(sizes), make


def _hugging_face_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if model.config.is_encoder_decoder and "labels" not in batch:
        batch = {**batch, "decoder_input_ids": batch["input_ids"]}
    options = {"return_loss": True} if _is_contrastive(type(model)) else {}
    output = model(**batch, **options)
    if getattr(output, "loss", None) is not None:
        loss: torch.Tensor = output.loss
        return loss
    last = getattr(output, "last_hidden_state", None)
    hidden: torch.Tensor = last if last is not None else output[0]
    return hidden.float().pow(2).mean()


def hub_config(transformers: Any, name: str) -> Any | None:
    """The configuration of the model called `name` on the Hub, or None where this machine doesn't know it."""
    try:
        # A path of the cached file; None where there is none, or an object that says that the file is known not to be.
        is_cached = isinstance(transformers.utils.hub.try_to_load_from_cache(name, "config.json"), str)
    except ValueError:
        is_cached = False  # not a name that the Hub could have
    if is_cached:
        return transformers.AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    shipped = {
        known.lower(): row["config"]
        for row in _rows()
        for full in row["names"]
        for known in (full, full.rpartition("/")[2])
    }
    fields = shipped.get(name.lower())
    return None if fields is None else transformers.AutoConfig.for_model(**fields)


def hub_names() -> list[str]:
    """Full names of the models whose configuration is shipped."""
    return [name for row in _rows() for name in row["names"]]


@cache
def _rows() -> list[dict[str, Any]]:
    text = files("memfit.frameworks.torch.trace").joinpath("hub_models.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)
    return rows

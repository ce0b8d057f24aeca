"""Configurations of models of the Hugging Face Hub, without the network.

What an earlier download left in the Hub's local cache is read first. For the models that people train most, the fields
of `config.json` that decide memory are shipped in `hub_models.json`; what is not named there is the default of
transformers. A model is found by its full name ("google-bert/bert-base-uncased") or by the part after the slash.
"""

import json
from functools import cache
from importlib.resources import files
from typing import Any


def hub_config(transformers: Any, name: str) -> Any | None:
    """The configuration of the model called `name` on the Hub, or None where this machine doesn't know it."""
    if _is_cached(transformers, name):
        return transformers.AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    fields = _shipped().get(name.lower())
    if fields is None:
        return None
    return transformers.AutoConfig.for_model(**fields)


def hub_names() -> list[str]:
    """Full names of the models whose configuration is shipped."""
    return [name for row in _rows() for name in row["names"]]


def _is_cached(transformers: Any, name: str) -> bool:
    try:
        # A path of the cached file; None where there is none, or an object that says that the file is known not to be.
        return isinstance(transformers.utils.hub.try_to_load_from_cache(name, "config.json"), str)
    except ValueError:
        # Not a name that the Hub could have.
        return False


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    return {
        known.lower(): row["config"]
        for row in _rows()
        for name in row["names"]
        for known in (name, name.rpartition("/")[2])
    }


@cache
def _rows() -> list[dict[str, Any]]:
    text = files("memfit.adapters.torch").joinpath("hub_models.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)
    return rows

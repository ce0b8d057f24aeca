"""Parameters of the time model that were fitted to measured steps (benchmarks/fit_step_times.py)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

_PAIRS = ("sustained", "spreads")


@dataclass(frozen=True, slots=True)
class Fitted:
    """What `parameters.json` holds.

    Args:
        parameters: of kernels and launches.
        sustained: shares of the catalogue's rates, of operations and of bytes, that devices sustain where that was
            measured, in those of an RTX 3090; of bytes with what a large cache serves from one kernel to the next.
        spreads: natural logarithms of measured over predicted time, the 2.5th and the 97.5th percentile, by kind of
            step, on families of models that parameters were not fitted to.
        devices: on which steps were measured.
    """

    parameters: Mapping[str, float]
    sustained: Mapping[str, tuple[float, float]]
    spreads: Mapping[str, tuple[float, float]]
    devices: frozenset[str]


@cache
def fitted() -> Fitted:
    """The packaged parameters."""
    content: dict[str, Any] = json.loads(files("memfit.timing").joinpath("parameters.json").read_text(encoding="utf-8"))
    sustained, spreads = ({name: (one, two) for name, (one, two) in content[key].items()} for key in _PAIRS)
    return Fitted(content["parameters"], sustained, spreads, frozenset(content["devices"]))

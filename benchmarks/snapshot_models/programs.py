"""Which program made which snapshot: by the beginning of its name, with the device and the stack it ran on."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from benchmarks.snapshot_models import adapters, course, small


@dataclass(frozen=True, slots=True)
class Program:
    """A program, and where to simulate it.

    Args:
        run: the program.
        device: that it ran on, or one like it where nobody says.
        stack: versions that it ran with.
        peak_error: most that the peak may be off.
        has_events: whether its allocations are held to the bar; not of programs known only in part.
        environment: variables that are set for it.
    """

    run: Callable[[], None]
    device: str
    stack: str
    peak_error: float = 0.001
    has_events: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


_LINYUN = re.compile(r"linyun_xl_ctx(\d+)_(forward|full_step)_(none|bf16)(?:_v(\d))?$")
_NIU = re.compile(r"niu_forward(_and_backward)?_(\d+)(_mixed_precision)?$")
# Measured before the program ran without gradients: their blocks live on.
_KEEPS_GRAPH = {"linyun_xl_ctx128_forward_bf16_v2", "linyun_xl_ctx128_forward_none_v3"}
_OTHERS = {
    # Quantized to 4 bits by its sizes, with float32 between; the libraries' versions are not known.
    "ftcourse": Program(adapters.adapter_step, "t4", "torch2.1-cu121", peak_error=0.03),
    "eor": Program(small.optimize_image, "titan-rtx", "torch2.2-cu121", has_events=False),
    "ckpttry_rm_save_to_frame": Program(
        small.checkpointed_perceptron,
        "rtx-3090",
        "torch2.12-cu130",
        has_events=False,
        environment={"CUBLAS_WORKSPACE_CONFIG": ":0:0"},
    ),
}


def program_of(name: str) -> Program | None:
    """The program behind a snapshot; None where it is not known."""
    match = _LINYUN.match(name)
    if match:
        run = partial(
            course.reference_steps,
            int(match[1]),
            trains=match[2] == "full_step",
            keeps_graph=name in _KEEPS_GRAPH,
            mixed=match[3] == "bf16",
        )
        return Program(run, "rtx-pro-6000", "torch2.11-cu130")
    match = _NIU.match(name)
    if match:
        run = partial(course.own_steps, int(match[2]), trains=bool(match[1]), mixed=bool(match[3]))
        # Nobody says which GPU it was; one that has no more than this one's cuBLAS workspace.
        return Program(run, "rtx-3090", "torch2.6-cu124")
    return _OTHERS.get(name)

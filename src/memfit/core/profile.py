"""The profile of a step: what the planner has to know beyond the timeline.

For each module that could be computed again in the backward pass: when it runs, what it allocates that nobody else
needs meanwhile, and what it costs. For each operator: the work it does. A profile is framework-free; an adapter makes
one by running the step on shapes with closer observation (`frameworks/torch/trace/profile.py`).

Times are ticks of `timeline`. Calls of one module are listed one by one: a module that is called twice a step is
computed again twice.
"""

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from memfit.core.timeline import Phase, Timeline

_Size = TypeVar("_Size")


class ProductSizes(NamedTuple, Generic[_Size]):
    """Of matrix products: matrices in the batch, and the length of the dimension that is summed up."""

    batch: _Size
    rows: _Size
    columns: _Size
    summed: _Size


class ConvolutionSizes(NamedTuple, Generic[_Size]):
    """Of convolutions.

    `inputs` and `outputs` are channels, `pixels` and `output_pixels` those of one image, `taps` the weights of a pair
    of channels. `is_last` is 1 where channels come last. `gradients` says which are computed: 1 for that of the input,
    2 of the weights, 4 of the bias, added up; 0 is the forward pass.
    """

    images: _Size
    inputs: _Size
    outputs: _Size
    groups: _Size
    pixels: _Size
    output_pixels: _Size
    taps: _Size
    is_last: _Size
    gradients: _Size


class MovingSizes(NamedTuple, Generic[_Size]):
    """Of all other operators; both flags are 0 or 1.

    `is_permuted` says whether input and output lie in different orders, `takes_statistics` whether a batch norm does.
    """

    written_bytes: _Size
    is_permuted: _Size
    takes_statistics: _Size


@dataclass(frozen=True, slots=True)
class Work:
    """One operator of the step, "aten.mm" for example; in the backward pass it belongs to its forward one's module.

    `flops` is 0 if it only moves data. `dtype` is that of its first floating-point input, or "". `sizes` are those of
    its kernel, and decide with the rest how long it takes (`memfit.timing`): `ProductSizes`, `ConvolutionSizes` or, of
    all others, `MovingSizes`; empty where the kernel isn't known more closely.
    `is_compiled` says whether a graph of `torch.compile` runs it.
    """

    module: str
    phase: Phase
    op: str
    flops: int
    moved_bytes: int
    dtype: str
    sizes: tuple[int, ...] = ()
    is_compiled: bool = False


@dataclass(frozen=True, slots=True)
class Drop:
    """A block, by its index in `timeline.blocks`, that is not there for a while if its module is computed again.

    It is gone from its last use in the forward pass, outside of the module too, to the module's backward pass.
    """

    block: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module in the (first) forward pass; ranges go from the first to the one after the last.

    Args:
        forward: ticks of its forward pass.
        backward: ticks of its backward pass.
        drops: blocks that are gone for a while if the call is computed again.
        offloads: blocks that would wait in host memory if what the call saves for the backward pass did: saved inside,
            by nobody outside, and no parameters; `start` is the last use, `end` the first one in the backward pass.
        extra_bytes: what computing it again needs for the moment, beyond what its backward pass finds anyway.
        operations: indices into `work` of its forward operators.
        holds: inputs that live longer if the call is computed again: from `start`, where they end in the plain step,
            to `end`, where the call's backward pass is over.
        keeps: inputs that stay where only the saving of tensors holds them in the plain step: if the call is computed
            again they are there, even if a drop of another call says that they are gone.
    """

    forward: tuple[int, int]
    backward: tuple[int, int]
    drops: tuple[Drop, ...]
    offloads: tuple[Drop, ...]
    extra_bytes: int
    operations: tuple[int, int]
    holds: tuple[Drop, ...] = ()
    keeps: tuple[Drop, ...] = ()


@dataclass(frozen=True, slots=True)
class Unit:
    """A module, never the model itself, that could be computed again in the backward pass; or why not (`refused`).

    Calls inside of another call of the same module are left out.
    """

    path: str
    kind: str
    calls: tuple[Call, ...]
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Profile:
    """A step, closely observed.

    Args:
        timeline: two steps, as in an estimate; units and work describe the first.
        units: every module with a path that was called in the forward pass, outer before inner, in order of call.
        work: every operator of the first step, in order: forward, backward, first update.
        optimizer: class name, "" without one.
        features: facts that decide which moves make sense: "convolution", "batch-norm" (in training mode), "dropout",
            "linear", "foreach" (the optimizer uses foreach kernels), "fused" (it is fused already), "fusable" (it can
            be), "autocast" (16-bit copies of parameters are made), "cross-entropy" (a cross entropy over a large
            vocabulary comes straight from a linear layer), "channels-first" (convolutions have that format), "adam"
            (whose state can have 8 bits), "steppable" (parameters can be updated one by one), "shared-parameters",
            "frozen-parameters", "sparse-gradients" (of embeddings), "changing-buffers" (the forward pass writes into
            buffers other than those of batch norms).
        num_parameters: elements of all parameters; `num_trainable` of those that are trained.
    """

    timeline: Timeline
    units: tuple[Unit, ...]
    work: tuple[Work, ...]
    batch_size: int | None
    optimizer: str
    features: frozenset[str]
    num_parameters: int
    num_trainable: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """Real passes of the step on the device in hand; `unit_seconds` are forward times of modules, over all calls."""

    batch_size: int
    forward_seconds: float
    backward_seconds: float
    unit_seconds: dict[str, float]

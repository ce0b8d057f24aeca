"""The settings of a plan: how a training step is run, as opposed to what it computes.

A `Settings` is plain data that the planner chooses, the tracer proves and `plan.apply` puts into practice: all three
read the same object, so that what was proven is what runs. The defaults leave the step as it is.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Annotated, Any

from memfit.core.errors import BadFile, BadInput
from memfit.core.typed_data import Count, made_of


class Keeps(StrEnum):
    """What a move does to the numbers of training."""

    EXACT = "exact"
    """The same gradients, bit by bit where kernels are deterministic."""
    ROUNDING = "rounding"
    """The same mathematics in another order or width."""
    CHANGES = "changes training"
    """Another optimization problem or another optimizer."""


class OptimizerKernels(StrEnum):
    """How the optimizer's update is computed."""

    KEEP = "keep"
    SINGLE = "single"
    """One parameter at a time (foreach=False): temporaries of one parameter."""
    FUSED = "fused"
    """One kernel (fused=True): no temporaries."""


class OptimizerState(StrEnum):
    """Where, and how wide, the optimizer's state is."""

    KEEP = "keep"
    EIGHT_BIT = "8-bit"
    HOST = "host"
    """State and update live in host memory; gradients go there and parameters come back."""


@dataclass(frozen=True, slots=True)
class Weighting:
    """How the losses of micro-batches make up the loss of the batch.

    Args:
        kind: "samples": a mean over samples, each part weighs by its number of them; "sum": parts just add up;
            "count": a mean over elements of one tensor of the batch that aren't ignored, such as tokens; "given": the
            loss function returns (loss, weight) itself.
        tensor: for "count", the place of that tensor in the batch, such as "['labels']" or "[1]".
        ignored: for "count", the value that doesn't count: -100 for labels, 0 for masks.
        skipped: for "count", leading positions of each sample that the loss leaves out: 1 where labels are shifted.
    """

    kind: str = "samples"
    tensor: str = ""
    ignored: int = -100
    skipped: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("samples", "sum", "count", "given"):
            raise BadInput(f"a weighting is one of samples, sum, count, given, but {self.kind!r} was given.")


_OF_UPDATE = ("kernels", "state", "step_in_backward", "set_to_none")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a step is run.

    Args:
        micro_batches: parts the batch is split into, one forward and backward pass each.
        weighting: how the losses of the parts add up.
        precision: "amp-bf16" or "amp-fp16" for autocast; None leaves the step's own.
        checkpoint: paths of the modules whose activations are computed again in the backward pass.
        offload: paths of the modules whose activations wait in host memory.
        cross_entropy_chunks: parts in which logits and cross entropy are computed; 0 leaves them whole.
        kernels: how the optimizer's update is computed.
        state: where the optimizer's state is.
        step_in_backward: each parameter is updated, and its gradient freed, as soon as the gradient is there.
        set_to_none: gradients are freed after each update rather than zeroed.
        expandable_segments: setting of PyTorch's CUDA allocator.
        channels_last: memory format of convolutions.
        num_devices: devices over which parameters, gradients and optimizer state are sharded (FSDP2).
        shard_offload: whether shards wait in host memory.
        lora_rank: rank of the adapters that are trained in place of the linear layers; 0: none.
        quantized_base: whether the frozen weights under the adapters are quantized: 4 bits in PyTorch, 8 in Keras.
        freeze: paths of the modules whose parameters aren't trained.
        micro_batch_size: samples of the largest part; a batch of another size than planned for is split into as many
            parts as that takes. 0: into `micro_batches` parts, or one for each sample where there are fewer.
        compile: whether `torch.compile` compiles the model (PyTorch).
        jit_compile: whether the step is compiled as a whole (Keras); None: as the model was compiled.
        donate: whether the update takes the place of the old parameters and state (JAX).
    """

    micro_batches: Annotated[int, 1] = 1
    weighting: Weighting = Weighting()
    precision: str | None = None
    checkpoint: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    cross_entropy_chunks: Count = 0
    kernels: OptimizerKernels = OptimizerKernels.KEEP
    state: OptimizerState = OptimizerState.KEEP
    step_in_backward: bool = False
    set_to_none: bool = True
    expandable_segments: bool = False
    channels_last: bool = False
    num_devices: Annotated[int, 1] = 1
    shard_offload: bool = False
    lora_rank: Count = 0
    quantized_base: bool = False
    freeze: tuple[str, ...] = ()
    micro_batch_size: Count = 0
    compile: bool = False
    jit_compile: bool | None = None
    donate: bool = False

    @property
    def splits(self) -> bool:
        """Whether they ask for more than one part."""
        return self.micro_batches > 1 or self.micro_batch_size > 0

    def part_size(self, num_samples: Any) -> Any:
        """Samples of all parts but the last, which has what is left; a tensor where a graph only knows when it runs."""
        # At least one sample: a batch smaller than the number of parts is split into as many parts as it has samples.
        return self.micro_batch_size or (num_samples + self.micro_batches - 1) // self.micro_batches

    @property
    def of_passes(self) -> "Settings":
        """What of it changes the forward and backward passes; all else as it is by default."""
        plain: dict[str, Any] = {name: getattr(Settings(), name) for name in _OF_UPDATE}
        return replace(self, **plain)

    @property
    def num_changed(self) -> int:
        """How many of them differ from the defaults, for a choice between equals."""
        plain = Settings()
        return sum(getattr(self, name) != getattr(plain, name) for name in Settings.__slots__ if name != "weighting")

    def to_json(self) -> dict[str, Any]:
        """A plain structure that `json` can write."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Settings":
        """The settings that `to_json` wrote."""
        unknown = sorted(set(data) - {field.name for field in fields(cls)})
        if unknown:
            raise BadFile(f"settings that this version doesn't know: {', '.join(unknown)}. Update memfit.")
        try:
            return made_of(cls, data)
        except (TypeError, ValueError) as error:
            raise BadFile(f"the setting {error}. Give a file that plan.save wrote.") from None

"""Small steps for the tests of the simulated device, whose bytes can be counted by hand."""

import torch
from torch import nn

from memfit.core.device import Device, Kind, Origin
from memfit.core.timeline import Block, Category, Phase, Timeline
from memfit.frameworks.torch.trace.trace import Step, Trace, trace

HOST = Device("cpu", "this machine", Kind.HOST, None, None, Origin.ASSUMED)


def cuda(*capability: int) -> Device:
    """A CUDA device of which nothing but its compute capability is known."""
    return Device("test", "Test GPU", Kind.CUDA, None, None, Origin.ASSUMED, capability)


AMPERE = cuda(8, 6)


def mean_of_output(model, batch):
    return model(batch).float().mean()


def run(model, batch, *, loss=mean_of_output, device=AMPERE, **options) -> Trace:
    """The trace of a training step, or with `training=False` of a forward pass."""
    return trace(Step(model, loss, batch, **options), device)


def observe(work, *inputs, device=AMPERE) -> tuple[object, Trace]:
    """(what `work(*inputs)` returned on the simulated device, its trace); results must hold no simulated tensor."""
    results = []

    def loss(model, batch):
        results.append(work(*batch))

    made = run(nn.Identity(), inputs, loss=loss, device=device, training=False)
    return results[0], made


def moment(timeline: Timeline, phase: Phase, step: int = 1) -> int:
    """The tick at which `phase` of `step` begins."""
    return next(mark.tick for mark in timeline.marks if mark.phase is phase and mark.step == step)


def span(timeline: Timeline, phase: Phase, step: int = 1) -> range:
    """The ticks of `phase` of `step`."""
    start = moment(timeline, phase, step)
    later = [mark.tick for mark in timeline.marks if mark.tick > start]
    return range(start, min(later, default=timeline.num_ticks))


def made_in(traced: Trace, phase: Phase, step: int = 1) -> list[Block]:
    """Blocks allocated during `phase` of `step`."""
    ticks = span(traced.timeline, phase, step)
    return [block for block in traced.timeline.blocks if block.start in ticks]


def forward_blocks(traced: Trace) -> list[Block]:
    return made_in(traced, Phase.FORWARD)


def sizes(blocks, op: str = "") -> list[int]:
    """Sizes of the blocks whose operator's name ends with `op`, in order of allocation."""
    return [block.size_bytes for block in blocks if block.op.endswith(op)]


def total(blocks, category: Category | None = None) -> int:
    return sum(block.size_bytes for block in blocks if category is None or block.category is category)


def kept_bytes(traced: Trace) -> int:
    """Activations alive when the first backward pass begins."""
    timeline = traced.timeline
    return total(timeline.live_at(moment(timeline, Phase.BACKWARD) - 1), Category.ACTIVATION)


def peak_of_temporaries(traced: Trace, phase: Phase, step: int = 1) -> int:
    """The most bytes of temporaries alive at once during `phase` of `step`."""
    timeline = traced.timeline
    return max(
        (total(timeline.live_at(tick), Category.TEMPORARY) for tick in span(timeline, phase, step)),
        default=0,
    )


def notes(traced: Trace) -> list[tuple[str, str]]:
    """(code, first word of the text) of each note."""
    return [(note.code, note.text.split(":")[0].split(" ")[0]) for note in traced.notes]


def line_of(function) -> int:
    """The number of the line after the one where `function` is defined."""
    return function.__code__.co_firstlineno + 1


def parameter_bytes(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())

"""Estimates made by hand for the tests of the reports: no framework, no allocator, figures that add up."""

import dataclasses

from memfit.core.device import Device, Kind, Origin
from memfit.core.estimate import Estimate, HostMemory, Note
from memfit.core.replay import OutOfMemory, Replay
from memfit.core.spread import Spread
from memfit.core.timeline import Block, Category, Mark, Phase, Timeline
from memfit.core.units import GIB, KIB, MIB

RTX_3090 = Device(
    name="rtx-3090",
    title="NVIDIA GeForce RTX 3090",
    kind=Kind.CUDA,
    nominal_bytes=24 * GIB,
    usable_bytes=int(23.7 * GIB),
    usable_origin=Origin.MEASURED,
    capability=(8, 6),
    num_multiprocessors=82,
    bandwidth_bytes_per_second=936e9,
    flops={"float32": 35.6e12},
    context_bytes=300 * MIB,
    source="torch's own error message",
    date="2026-11-01",
)
MYSTERY = Device("mystery", "Mystery accelerator", Kind.CUDA, None, None, Origin.ASSUMED)


class Recorder:
    """Builds a `Timeline` event by event."""

    def __init__(self) -> None:
        """Start with no blocks at tick 0."""
        self.tick = 0
        self.blocks: list[Block] = []
        self.marks: list[Mark] = []

    def mark(self, phase: Phase, step: int) -> None:
        """Enter a phase."""
        self.marks.append(Mark(self.tick, phase, step))

    def allocate(self, size_bytes: int, category: Category, module: str = "", op: str = "", source: str = "") -> int:
        """Allocate a block; gives its index for `free`."""
        self.blocks.append(Block(size_bytes, self.tick, None, category, self.marks[-1].phase, module, op, source))
        self.tick += 1
        return len(self.blocks) - 1

    def free(self, index: int) -> None:
        """Free a block."""
        self.blocks[index] = dataclasses.replace(self.blocks[index], end=self.tick)
        self.tick += 1

    def timeline(self) -> Timeline:
        """The timeline recorded so far."""
        return Timeline(tuple(self.blocks), self.tick, tuple(self.marks))


def make_timeline(num_layers: int = 50, num_steps: int = 2, scale: int = MIB) -> Timeline:
    """A residual network trained with Adam: activations pile up forward and melt away backward."""
    record = Recorder()
    record.mark(Phase.SETUP, 0)
    widths = [1 + layer * 4 // num_layers for layer in range(num_layers)]
    # Layers are numbered within their stage, as in a ResNet.
    names = [
        f"layer{width}.{layer - widths.index(width)}.conv"
        for layer, width in zip(range(num_layers), widths, strict=True)
    ]
    for name, width in zip(names, widths, strict=True):
        record.allocate(width * scale // 2, Category.PARAMETER, name, "aten.empty", "model.py:12")
        record.allocate(8 * KIB, Category.BUFFER, name.replace("conv", "norm"), "aten.zeros", "model.py:13")
    batch = record.allocate(6 * scale, Category.BATCH, "", "aten.to", "train.py:7")
    states: list[int] = []
    for step in range(1, num_steps + 1):
        _step(record, step, names, widths, scale, states)
    record.free(batch)
    return record.timeline()


def _step(record: Recorder, step: int, names: list[str], widths: list[int], scale: int, states: list[int]) -> None:
    record.mark(Phase.FORWARD, step)
    kept = []
    for name, width in zip(names, widths, strict=True):
        workspace = record.allocate(2 * scale, Category.WORKSPACE, name, "cudnn", "model.py:31")
        kept.append(
            record.allocate((14 - 3 * width) * scale, Category.ACTIVATION, name, "aten.convolution", "model.py:31")
        )
        record.free(workspace)
        norm = name.replace("conv", "norm")
        kept.append(
            record.allocate(
                (14 - 3 * width) * scale, Category.ACTIVATION, norm, "aten.native_batch_norm", "model.py:32"
            )
        )
    record.mark(Phase.BACKWARD, step)
    gradients = []
    for name, width in zip(reversed(names), reversed(widths), strict=True):
        upstream = record.allocate(
            (14 - 3 * width) * scale, Category.TEMPORARY, name, "aten.convolution_backward", "train.py:19"
        )
        gradients.append(
            record.allocate(width * scale // 2, Category.GRADIENT, name, "aten.convolution_backward", "train.py:19")
        )
        record.free(kept.pop())
        record.free(kept.pop())
        record.free(upstream)
    record.mark(Phase.OPTIMIZER, step)
    for name, width in zip(names, widths, strict=True):
        if step == 1:
            for _ in range(2):
                states.append(
                    record.allocate(
                        width * scale // 2, Category.OPTIMIZER_STATE, name, "aten.zeros_like", "train.py:20"
                    )
                )
        record.free(record.allocate(width * scale // 2, Category.TEMPORARY, name, "aten.sqrt", "train.py:20"))
    for gradient in gradients:
        record.free(gradient)


def make_replay(timeline: Timeline, out_of_memory: OutOfMemory | None = None) -> Replay:
    """What a simple allocator would make of the timeline: 512-byte rounding, 20 MiB segments, no memory returned."""
    allocated, reserved, live = [], [], 0
    for index, born in timeline.events():
        size = -(-timeline.blocks[index].size_bytes // 512) * 512
        live += size if born else -size
        allocated.append(live)
        reserved.append(max(reserved[-1] if reserved else 0, -(-live // (20 * MIB)) * 20 * MIB))
    if out_of_memory is not None:
        allocated, reserved = allocated[: out_of_memory.tick], reserved[: out_of_memory.tick]
    return Replay(
        allocated=tuple(allocated),
        reserved=tuple(reserved),
        allocated_peak_bytes=max(allocated, default=0),
        reserved_peak_bytes=max(reserved, default=0),
        requested_peak_bytes=timeline.peak()[1],
        num_segments=(reserved[-1] if reserved else 0) // (20 * MIB),
        out_of_memory=out_of_memory,
    )


def make_estimate(timeline: Timeline | None = None, device: Device = RTX_3090, **changes: object) -> Estimate:
    """A training step of a residual network on an RTX 3090; `changes` replace fields of the estimate."""
    timeline = make_timeline() if timeline is None else timeline
    replay = make_replay(timeline)
    peak_bytes = replay.reserved_peak_bytes + 300 * MIB
    estimate = Estimate(
        subject="ResNet",
        device=device,
        mode="training",
        precision="float32",
        batch_size=32,
        timeline=timeline,
        replay=replay,
        context_bytes=300 * MIB,
        certain_bytes=peak_bytes * 90 // 100,
        tight_bytes=peak_bytes * 96 // 100,
        host=HostMemory(
            {"interpreter and libraries": 900 * MIB, "model before it moves": 60 * MIB, "4 loader workers": 720 * MIB}
        ),
        notes=(
            Note(
                "cudnn-workspace",
                "Workspaces of cuDNN are assumed from the shapes; benchmark mode may pick larger ones.",
            ),
            Note("data-dependent-shape", "A shape depends on data; its largest value was assumed.", "model.py:58"),
        ),
        spreads=(
            Spread("tensors", peak_bytes * 2 // 100, peak_bytes * 2 // 100, "published runs"),
            Spread("cuDNN", 0, peak_bytes * 7 // 100, "its manual", decides=False),
        ),
        num_parameters=25_557_032,
        seconds=1.42,
    )
    return dataclasses.replace(estimate, **changes)  # type: ignore[arg-type]


def make_large_estimate() -> Estimate:
    """About 5,000 blocks and 10,000 ticks: what ResNet-50 leaves behind."""
    return make_estimate(make_timeline(num_layers=240, num_steps=3, scale=MIB))


def make_failed_estimate() -> Estimate:
    """A step that runs out of memory half-way on a device of 900 MiB."""
    timeline = make_timeline()
    whole = make_replay(timeline)
    lost = OutOfMemory(200, 64 * MIB, allocated_bytes=whole.allocated[199], reserved_bytes=whole.reserved[199])
    small = dataclasses.replace(RTX_3090, usable_bytes=900 * MIB)
    return make_estimate(timeline, small, replay=dataclasses.replace(whole, out_of_memory=lost))


def make_stopped_estimate() -> Estimate:
    """The same, with a replay that ends where it ran out of memory."""
    failed = make_failed_estimate()
    return dataclasses.replace(failed, replay=make_replay(failed.timeline, failed.replay.out_of_memory))

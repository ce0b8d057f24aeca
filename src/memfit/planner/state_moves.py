"""Moves on what outlives a step: optimizer temporaries and states, and the sharding of all that over devices."""

from memfit.core.settings import Keeps, OptimizerKernels
from memfit.core.timeline import Block, Category, Phase
from memfit.planner.move import Move, Situation
from memfit.planner.retiming import BEFORE, Life, lives, rebuild, resized
from memfit.planner.structure import Spans, repeated_units, unit_of

# bitsandbytes leaves states of fewer elements as they are (min_8bit_size), and keeps a 4-byte scale for each 256.
_MIN_ELEMENTS = 4096
_SCALED_TOGETHER = 256


def fuse_optimizer(situation: Situation) -> Move | None:
    """The update of one parameter after the other, or in one fused kernel, instead of all at once."""
    timeline = situation.timeline
    spans = Spans(timeline)
    largest: dict[int, Block] = {}
    dropped: set[int] = set()
    for block in timeline.blocks:
        if block.phase is Phase.OPTIMIZER and block.category is Category.TEMPORARY and "_foreach" in block.op:
            dropped.add(block.start)
            index = spans.index(block.start)
            if index not in largest or block.size_bytes > largest[index].size_bytes:
                largest[index] = block
    if not dropped:
        return None
    dropped -= {block.start for block in largest.values()}
    fused = situation.is_fusable
    return situation.move(
        "update parameters with a fused optimizer" if fused else "update one parameter at a time",
        Keeps.ROUNDING,
        f"{'fused=True' if fused else 'foreach=False'} in the constructor of the optimizer",
        rebuild([life for life in lives(timeline) if life.block.start not in dropped], timeline.marks),
        kernels=OptimizerKernels.FUSED if fused else OptimizerKernels.SINGLE,
    )


def shrink_states(situation: Situation) -> Move | None:
    """Optimizer states in 8 bits with a scale per group instead of 32."""
    timeline = situation.timeline
    moved, found = [], False
    for life in lives(timeline):
        block = life.block
        if block.category is Category.OPTIMIZER_STATE and block.size_bytes >= 4 * _MIN_ELEMENTS:
            found = True
            num_elements = block.size_bytes // 4
            moved.append(resized(life, num_elements + 4 * -(-num_elements // _SCALED_TOGETHER)))
        else:
            moved.append(life)
    if not found:
        return None
    return situation.move(
        "keep the optimizer's state in 8 bits",
        Keeps.CHANGES,
        "the 8-bit variant of the optimizer, such as bitsandbytes.optim.AdamW8bit or torchao.optim.AdamW8bit",
        rebuild(moved, timeline.marks),
    )


def shard(situation: Situation) -> Move | None:
    """Parameters, gradients and states split over two devices, each of which gathers one unit at a time.

    What fully sharded training must hold beside its shard: the parameters outside of any unit, two units gathered (the
    one in use and the next), and in the backward pass the gradient of one before it is reduced.
    """
    timeline = situation.timeline
    units = repeated_units(timeline, 1)
    if situation.num_devices > 1 or not units:
        return None
    sizes: dict[str | None, int] = {}
    for block in timeline.blocks:
        if block.category is Category.PARAMETER:
            unit = unit_of(block.module, 1)
            key = unit if unit in units else None
            sizes[key] = sizes.get(key, 0) + block.size_bytes
    outside = sizes.pop(None, 0)
    if not sizes:
        return None
    largest = max(sizes.values())
    persistent = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE)

    def is_sharded(block: Block) -> bool:
        of_update = block.phase is Phase.OPTIMIZER and block.category is Category.TEMPORARY
        return block.category in persistent or of_update

    moved = [
        resized(life, -(-life.block.size_bytes // 2)) if is_sharded(life.block) else life for life in lives(timeline)
    ]
    gathered = {Phase.FORWARD: outside + 2 * largest, Phase.BACKWARD: outside + 3 * largest}
    for span in Spans(timeline).all:
        if span.phase in gathered:
            block = Block(gathered[span.phase], 0, None, Category.TEMPORARY, span.phase, op="all_gather")
            moved.append(Life(block, span.start + BEFORE, span.end + BEFORE))
    return situation.move(
        "shard parameters, gradients and states over 2 devices",
        Keeps.ROUNDING,
        f"torchrun --nproc-per-node 2, fully_shard(block) for each of {units[0]} to {units[-1]}, then "
        "fully_shard(model)",
        rebuild(moved, timeline.marks),
    )

"""The moves: every change a plan can make, with its name, what it does to the numbers, and words for it."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from memfit.core.device import Device
from memfit.core.errors import BadInput
from memfit.core.settings import Keeps, OptimizerKernels, OptimizerState, Settings

MICRO_BATCH = "micro-batch"
CHECKPOINT = "checkpoint"
OFFLOAD = "activation-offload"
AUTOCAST = "autocast"
CHUNKED_LOSS = "chunked-cross-entropy"
FUSED = "fused-optimizer"
FOREACH_OFF = "foreach-off"
STEP_IN_BACKWARD = "step-in-backward"
EIGHT_BIT = "8-bit-optimizer"
HOST_OPTIMIZER = "host-optimizer"
SET_TO_NONE = "set-to-none"
EXPANDABLE = "expandable-segments"
CHANNELS_LAST = "channels-last"
SHARD = "shard"
LORA = "lora"
QLORA = "qlora"
FREEZE = "freeze"
DONATE = "donate"
COMPILE = "compile"
WHOLE_COMPILE = "jit-compile"

KEEPS = {
    CHECKPOINT: Keeps.EXACT,
    OFFLOAD: Keeps.EXACT,
    STEP_IN_BACKWARD: Keeps.EXACT,
    SET_TO_NONE: Keeps.EXACT,
    EXPANDABLE: Keeps.EXACT,
    DONATE: Keeps.EXACT,
    COMPILE: Keeps.ROUNDING,
    WHOLE_COMPILE: Keeps.ROUNDING,
    MICRO_BATCH: Keeps.ROUNDING,
    AUTOCAST: Keeps.ROUNDING,
    CHUNKED_LOSS: Keeps.ROUNDING,
    FUSED: Keeps.ROUNDING,
    FOREACH_OFF: Keeps.ROUNDING,
    HOST_OPTIMIZER: Keeps.ROUNDING,
    CHANNELS_LAST: Keeps.ROUNDING,
    SHARD: Keeps.ROUNDING,
    EIGHT_BIT: Keeps.CHANGES,
    LORA: Keeps.CHANGES,
    QLORA: Keeps.CHANGES,
    FREEZE: Keeps.CHANGES,
}
"""Every move by name."""

BY_NAME = frozenset({COMPILE})
"""Moves that only their own name allows: each trace of a compiled step takes seconds to a minute."""

_PLAIN = Settings()
APPROXIMATE = "approximate"
"""Allows micro-batches where samples of a batch see each other: batch norm, contrastive losses."""

DROPOUT = "dropout masks are drawn for each part anew"
"""The caveat of micro-batches where there is dropout."""

COMPILED_DROPOUT = "dropout draws other masks"
"""The caveat of compiled models where there is dropout."""

KEEP, AUTO = "keep", "auto"
"""Values of `precision`: as the step has it, or autocast where it helps."""

# Before Ampere, tensor cores know float16 alone.
_FIRST_WITH_BFLOAT16 = (8, 0)

DEFAULT_ALLOW = (Keeps.EXACT.value, Keeps.ROUNDING.value)


def autocast_of(device: Device) -> str:
    """The precision of autocast that a device is good at."""
    known = device.capability is None or device.capability >= _FIRST_WITH_BFLOAT16
    return "amp-bf16" if known else "amp-fp16"


def allowed_moves(allow: Iterable[str]) -> frozenset[str]:
    """Names of the moves that `allow` lets in.

    Args:
        allow: any of "exact", "rounding", "changes training" (all moves of that kind but `BY_NAME`), names of
            moves, and "approximate"; a name behind a minus sign is left out, of the default where nothing else is
            given.

    >>> sorted(allowed_moves(["exact", "-checkpoint"]))
    ['activation-offload', 'donate', 'expandable-segments', 'set-to-none', 'step-in-backward']
    """
    given = allow.split(",") if isinstance(allow, str) else list(allow) if isinstance(allow, Iterable) else [allow]
    if not all(isinstance(word, str) for word in given):
        raise BadInput(f"allow takes words such as ['exact', 'rounding'], but {allow!r} was given.")
    words = [word.strip() for word in given]
    if words and all(word.startswith("-") for word in words):
        # Nothing but exceptions: to what is allowed by default.
        words = [*DEFAULT_ALLOW, *words]
    groups = {name: {name} for name in (*KEEPS, APPROXIMATE)}
    groups |= {kind.value: {name for name, keeps in KEEPS.items() if keeps is kind} - BY_NAME for kind in Keeps}
    groups["changes"] = groups[Keeps.CHANGES.value]
    for word in words:
        if word.removeprefix("-") not in groups:
            known = [*sorted({*map(str, Keeps), "changes"}), APPROXIMATE, *KEEPS]
            close = difflib.get_close_matches(word.removeprefix("-"), known, n=1)
            names = f"Give any of {', '.join(known)}; a minus sign in front leaves one out."
            hint = f"Did you mean {close[0]!r}?" if close else names
            raise BadInput(f"{word!r} is not something that can be allowed. {hint}")
    allowed = set().union(*(groups[word] for word in words if word in groups))
    return frozenset(allowed.difference(*(groups[word[1:]] for word in words if word.startswith("-"))))


@dataclass(frozen=True, slots=True)
class UsedMove:
    """A move that some settings use, in words, and the same settings without it."""

    name: str
    short: str
    title: str
    keeps: Keeps
    without: Settings
    caveat: str = ""


def used_moves(
    settings: Settings,
    *,
    batch_size: int | None = None,
    approximate: str = "",
    dropout: bool = False,
    plain: Settings = _PLAIN,
) -> list[UsedMove]:
    """The moves of some settings; `approximate` says why micro-batches only approximate the step, if they do."""
    moves: list[UsedMove] = []

    def add(name: str, short: str, title: str, *fields: str, caveat: str = "", keeps: Keeps | None = None) -> None:
        back: dict[str, Any] = {field: getattr(plain, field) for field in fields}
        moves.append(UsedMove(name, short, title, keeps or KEEPS[name], replace(settings, **back), caveat))

    if (parts := settings.micro_batches) > 1:
        size = "" if batch_size is None else f" of {-(-batch_size // parts)}"
        title = f"{parts} micro-batches{size}, gradients accumulated"
        caveat, keeps = approximate or (DROPOUT if dropout else ""), Keeps.CHANGES if approximate else None
        add(
            MICRO_BATCH,
            f"{parts} micro-batches",
            title,
            "micro_batches",
            "micro_batch_size",
            caveat=caveat,
            keeps=keeps,
        )
    if count := len(settings.checkpoint):
        title = f"recompute {count} module{'s' * (count > 1)}: {named(settings.checkpoint)}"
        add(CHECKPOINT, f"recompute {count}", title, "checkpoint")
    if count := len(settings.offload):
        add(OFFLOAD, f"offload {count}", f"offload activations of {named(settings.offload)} to host memory", "offload")
    if settings.precision and settings.precision != plain.precision:
        width = settings.precision.removeprefix("amp-")
        caveat = "with loss scaling" if width == "fp16" else ""
        add(AUTOCAST, settings.precision, f"autocast to {width}", "precision", caveat=caveat)
    if chunks := settings.cross_entropy_chunks:
        add(CHUNKED_LOSS, "chunked loss", f"cross entropy in {chunks} chunks", "cross_entropy_chunks")
    if settings.kernels is OptimizerKernels.FUSED:
        add(FUSED, "fused optimizer", "fused optimizer kernels", "kernels")
    elif settings.kernels is OptimizerKernels.SINGLE:
        add(FOREACH_OFF, "single optimizer", "update one parameter at a time (foreach=False)", "kernels")
    if settings.state is OptimizerState.EIGHT_BIT:
        add(EIGHT_BIT, "8-bit optimizer state", "8-bit optimizer state", "state")
    elif settings.state is OptimizerState.HOST:
        add(HOST_OPTIMIZER, "host optimizer state", "optimizer state and update in host memory", "state")
    if settings.step_in_backward:
        title, caveat = "optimizer step inside the backward pass", "gradients can't be clipped by their common norm"
        add(STEP_IN_BACKWARD, "step in backward", title, "step_in_backward", caveat=caveat)
    if settings.expandable_segments:
        add(EXPANDABLE, "expandable segments", "expandable segments of the allocator", "expandable_segments")
    if settings.channels_last:
        add(CHANNELS_LAST, "channels_last", "convolutions in channels_last format", "channels_last")
    if (count := settings.num_devices) > 1:
        where = ", shards in host memory" if settings.shard_offload else ""
        title = f"shard over {count} devices (FSDP2){where}"
        add(SHARD, f"sharded over {count}", title, "num_devices", "shard_offload")
    if rank := settings.lora_rank:
        name, over = (QLORA, " over quantized weights") if settings.quantized_base else (LORA, "")
        add(name, f"rank {rank} adapters", f"train adapters of rank {rank}{over}", "lora_rank", "quantized_base")
    if settings.freeze:
        add(FREEZE, "frozen parts", f"freeze {named(settings.freeze)}", "freeze")
    if settings.compile:
        caveat = COMPILED_DROPOUT if dropout else ""
        add(COMPILE, "compiled", "compile the model (torch.compile)", "compile", caveat=caveat)
    if settings.donate and not plain.donate:
        add(DONATE, "donated", "parameters and state are updated in place (donated)", "donate")
    if settings.jit_compile is not None and settings.jit_compile != plain.jit_compile:
        words = "compile the step as a whole (jit_compile=True)" if settings.jit_compile else "jit_compile=False"
        add(WHOLE_COMPILE, "compiled as a whole" if settings.jit_compile else words, words, "jit_compile")
    if settings.set_to_none and not plain.set_to_none:
        add(SET_TO_NONE, "gradients freed early", "free gradients right after each update", "set_to_none")
    return moves


def label(settings: Settings, plain: Settings = _PLAIN) -> str:
    """The moves in a few words."""
    # The precision belongs to the label of every candidate, also where the step has it already.
    moves = used_moves(settings, plain=replace(plain, precision=None))
    return ", ".join(move.short for move in moves) or "as it is"


_NUM_NAMED = 3
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def named(paths: tuple[str, ...]) -> str:
    """A few paths as people name them.

    >>> named(("h.0", "h.1", "h.2", "h.5", "head"))
    'h.0-2, h.5, head'
    """
    # (what comes before the first number, what follows it, first and last number); of a path without any, itself.
    groups: list[tuple[str, str, str, str]] = []
    for path in paths:
        match = _NUMBER.search(path)
        if match is None:
            groups.append((path, "", "", "-1"))
            continue
        stem, number, tail = path[: match.start()], match[0], path[match.end() :]
        if groups and groups[-1][:2] == (stem, tail) and int(number) == int(groups[-1][3]) + 1:
            groups[-1] = (stem, tail, groups[-1][2], number)
        else:
            groups.append((stem, tail, number, number))
    texts = [f"{stem}{begin if begin in ('', end) else f'{begin}-{end}'}{tail}" for stem, tail, begin, end in groups]
    more = len(texts) - _NUM_NAMED
    return ", ".join(texts) if more <= 1 else ", ".join(texts[:_NUM_NAMED]) + f" and {more} more"

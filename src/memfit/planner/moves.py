"""The moves: every change a plan can make, with its name, what it does to the numbers, and words for it."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, replace

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
WHOLE_COMPILE = "jit-compile"

KEEPS = {
    CHECKPOINT: Keeps.EXACT,
    OFFLOAD: Keeps.EXACT,
    STEP_IN_BACKWARD: Keeps.EXACT,
    SET_TO_NONE: Keeps.EXACT,
    EXPANDABLE: Keeps.EXACT,
    DONATE: Keeps.EXACT,
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

_PLAIN = Settings()
APPROXIMATE = "approximate"
"""Allows micro-batches where samples of a batch see each other: batch norm, contrastive losses."""

DROPOUT = "dropout masks are drawn for each part anew"
"""The caveat of micro-batches where there is dropout."""

DEFAULT_ALLOW = (Keeps.EXACT.value, Keeps.ROUNDING.value)


def allowed_moves(allow: Iterable[str]) -> frozenset[str]:
    """Names of the moves that `allow` lets in.

    Args:
        allow: any of "exact", "rounding", "changes training" (all moves of that kind), names of moves, and
            "approximate"; a name behind a minus sign is left out, of the default where nothing else is given.

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
    kinds = {kind.value for kind in Keeps} | {"changes"}
    found: set[str] = set()
    for word in words:
        name = word.removeprefix("-")
        if name not in kinds and name not in KEEPS and name != APPROXIMATE:
            raise BadInput(_unknown(word, [*sorted(kinds), APPROXIMATE, *KEEPS]))
    for word in words:
        if word in KEEPS or word == APPROXIMATE:
            found.add(word)
        elif word in kinds:
            kind = Keeps.CHANGES if word.startswith("changes") else Keeps(word)
            found.update(name for name, keeps in KEEPS.items() if keeps is kind)
    for word in words:
        if word.startswith("-"):
            name = word[1:]
            group = Keeps.CHANGES.value if name == "changes" else name
            found -= {name, *(move for move, keeps in KEEPS.items() if keeps.value == group)}
    return frozenset(found)


def _unknown(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word.removeprefix("-"), known, n=1)
    if close:
        return f"{word!r} is nothing that can be allowed. Did you mean {close[0]!r}?"
    names = ", ".join(known)
    return f"{word!r} is nothing that can be allowed. Give any of {names}; a minus sign in front leaves one out."


@dataclass(frozen=True, slots=True)
class UsedMove:
    """A move that some settings use.

    Args:
        name: of the move.
        title: in words.
        keeps: what it does to the numbers here.
        without: the same settings but for this move.
        caveat: what must be known, or "".
    """

    name: str
    title: str
    keeps: Keeps
    without: Settings
    caveat: str = ""


def used_moves(
    settings: Settings,
    *,
    batch_size: int | None,
    approximate: str = "",
    dropout: bool = False,
    plain: Settings = _PLAIN,
) -> list[UsedMove]:
    """The moves of some settings.

    Args:
        settings: of a plan.
        batch_size: samples of the whole batch.
        approximate: why micro-batches only approximate the step, or "".
        dropout: whether the step has any.
        plain: the step as it is.
    """
    found: list[UsedMove] = []

    def add(name: str, title: str, caveat: str = "", keeps: Keeps | None = None, **back: object) -> None:
        found.append(UsedMove(name, title, keeps or KEEPS[name], replace(settings, **back), caveat))  # type: ignore[arg-type]

    if settings.micro_batches > 1:
        size = "" if batch_size is None else f" of {-(-batch_size // settings.micro_batches)}"
        title = f"{settings.micro_batches} micro-batches{size}, gradients accumulated"
        add(
            MICRO_BATCH,
            title,
            approximate or (DROPOUT if dropout else ""),
            Keeps.CHANGES if approximate else None,
            micro_batches=1,
        )
    if settings.checkpoint:
        count = len(settings.checkpoint)
        add(CHECKPOINT, f"recompute {count} module{'s' * (count > 1)}: {named(settings.checkpoint)}", checkpoint=())
    if settings.offload:
        add(OFFLOAD, f"activations of {named(settings.offload)} wait in host memory", offload=())
    if settings.precision and settings.precision != plain.precision:
        width = settings.precision.removeprefix("amp-")
        caveat = "with loss scaling" if width == "fp16" else ""
        add(AUTOCAST, f"autocast to {width}", caveat, precision=plain.precision)
    if settings.cross_entropy_chunks:
        add(CHUNKED_LOSS, f"cross entropy in {settings.cross_entropy_chunks} chunks", cross_entropy_chunks=0)
    add_optimizer_moves(settings, add)
    if settings.set_to_none and not plain.set_to_none:
        add(SET_TO_NONE, "free gradients after each update (set_to_none=True)", set_to_none=False)
    if settings.expandable_segments:
        add(EXPANDABLE, "segments of the allocator that grow", expandable_segments=False)
    if settings.channels_last:
        add(CHANNELS_LAST, "convolutions in channels_last format", channels_last=False)
    if settings.num_devices > 1:
        where = ", shards in host memory" if settings.shard_offload else ""
        add(SHARD, f"shard over {settings.num_devices} devices (FSDP2){where}", num_devices=1, shard_offload=False)
    if settings.lora_rank:
        name = QLORA if settings.quantized_base else LORA
        bits = " over quantized weights" if settings.quantized_base else ""
        add(name, f"train adapters of rank {settings.lora_rank}{bits}", lora_rank=0, quantized_base=False)
    if settings.donate and not plain.donate:
        add(DONATE, "parameters and state are updated in place (donated)", donate=False)
    if settings.jit_compile is not None and settings.jit_compile != plain.jit_compile:
        words = "compile the step as a whole (jit_compile=True)" if settings.jit_compile else "jit_compile=False"
        add(WHOLE_COMPILE, words, jit_compile=plain.jit_compile)
    if settings.freeze:
        add(FREEZE, f"freeze {named(settings.freeze)}", freeze=())
    return found


def add_optimizer_moves(settings: Settings, add: object) -> None:
    """Adds the moves of the optimizer."""
    assert callable(add)
    if settings.kernels is OptimizerKernels.FUSED:
        add(FUSED, "fused optimizer kernels", kernels=OptimizerKernels.KEEP)
    elif settings.kernels is OptimizerKernels.SINGLE:
        add(FOREACH_OFF, "update one parameter at a time (foreach=False)", kernels=OptimizerKernels.KEEP)
    if settings.step_in_backward:
        caveat = "gradients can't be clipped by their common norm"
        add(STEP_IN_BACKWARD, "optimizer step inside the backward pass", caveat, step_in_backward=False)
    if settings.state is OptimizerState.EIGHT_BIT:
        add(EIGHT_BIT, "8-bit optimizer state", state=OptimizerState.KEEP)
    elif settings.state is OptimizerState.HOST:
        add(HOST_OPTIMIZER, "optimizer state and update in host memory", state=OptimizerState.KEEP)


def label(settings: Settings) -> str:
    """The moves in a few words."""
    short = [
        (f"{settings.micro_batches} micro-batches", settings.micro_batches > 1),
        (f"recompute {len(settings.checkpoint)}", bool(settings.checkpoint)),
        (f"offload {len(settings.offload)}", bool(settings.offload)),
        (settings.precision or "", settings.precision is not None),
        ("chunked loss", settings.cross_entropy_chunks > 0),
        (f"{settings.kernels.value} optimizer", settings.kernels is not OptimizerKernels.KEEP),
        (f"{settings.state.value} optimizer state", settings.state is not OptimizerState.KEEP),
        ("step in backward", settings.step_in_backward),
        ("expandable segments", settings.expandable_segments),
        ("channels_last", settings.channels_last),
        (f"sharded over {settings.num_devices}", settings.num_devices > 1),
        (f"rank {settings.lora_rank} adapters", settings.lora_rank > 0),
        ("frozen parts", bool(settings.freeze)),
        ("donated", settings.donate),
        ("compiled as a whole", bool(settings.jit_compile)),
    ]
    return ", ".join(text for text, used in short if used) or "as it is"


_NUM_NAMED = 3


def named(paths: tuple[str, ...]) -> str:
    """A few paths as people name them.

    >>> named(("h.0", "h.1", "h.2", "h.5", "head"))
    'h.0-2, h.5, head'
    """
    groups: list[tuple[str, str, str, str]] = []
    for path in paths:
        first, number, last = _split(path)
        if groups and number:
            stem, tail, begin, end = groups[-1]
            if stem == first and tail == last and int(number) == int(end) + 1:
                groups[-1] = (stem, tail, begin, number)
                continue
        groups.append((first, last, number, number) if number else (path, "", "", "-1"))
    texts = [
        stem if not begin else f"{stem}{begin if begin == end else f'{begin}-{end}'}{tail}"
        for stem, tail, begin, end in groups
    ]
    more = len(texts) - _NUM_NAMED
    return ", ".join(texts) if more <= 1 else ", ".join(texts[:_NUM_NAMED]) + f" and {more} more"


def _split(path: str) -> tuple[str, str, str]:
    """(what comes before the first number, the number, what follows)."""
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            head, tail = ".".join(parts[:index]), ".".join(parts[index + 1 :])
            return f"{head}." if head else "", part, f".{tail}" if tail else ""
    return path, "", ""

"""What to tell the next attempt: something smaller, and never anything that an attempt was told before."""

from collections.abc import Collection
from dataclasses import replace

from memfit.core.supervised import Configuration

# Of the memory, what the plan of an attempt may use beside that of the one before.
_NEXT_SHARE = 0.75
_LEAST_SHARE = 0.3


def next_configuration(
    tried: Collection[Configuration],
    used: int | None,
    *,
    rescues: bool = True,
    plans: bool = False,
    reserved: bool = False,
) -> Configuration | None:
    """What the next attempt is told; None when nothing is left.

    Args:
        tried: what all attempts so far were told, the latest last.
        used: size of the micro-batches at the end of the latest, where a guard or an integration tells.
        rescues: whether the script's framework is one whose operations can be rescued.
        plans: whether its guard plans for the memory it is told of.
        reserved: whether the latest was refused address space while it had memory left.
    """
    latest = list(tried)[-1]
    if reserved:
        # It needs nothing smaller.
        return replace(latest, reserves=True)
    size = used if used is not None else latest.micro_batch_size
    # A size that nobody has used changes nothing, so that it would be the same attempt again.
    halved = used // 2 if used is not None and used > 1 else latest.micro_batch_size
    share = round(latest.share * _NEXT_SHARE, 2)
    candidates = []
    if plans and share >= _LEAST_SHARE:
        # What may not be split is planned for with recomputation.
        candidates.append(replace(latest, micro_batch_size=halved, share=share))
    elif halved != latest.micro_batch_size:
        candidates.append(replace(latest, micro_batch_size=halved))
    if rescues:
        rescued = replace(latest, micro_batch_size=None if size is None else 1, rescue=True)
        candidates += [rescued, replace(rescued, eager=True)]
    return next((candidate for candidate in candidates if candidate not in tried), None)

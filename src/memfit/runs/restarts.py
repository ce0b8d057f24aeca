"""What to tell the next attempt: something smaller, and never anything that an attempt was told before."""

from collections.abc import Collection, Iterator
from dataclasses import replace

from memfit.core.supervised import Configuration


def next_configuration(tried: Collection[Configuration], used: int | None) -> Configuration | None:
    """What the next attempt is told; None when nothing is left.

    Args:
        tried: what all attempts so far were told, the latest last.
        used: size of the micro-batches at the end of the latest, where a guard or an integration tells.
    """
    latest = list(tried)[-1]
    return next((candidate for candidate in _candidates(latest, used) if candidate not in tried), None)


def _candidates(latest: Configuration, used: int | None) -> Iterator[Configuration]:
    size = used if used is not None else latest.micro_batch_size
    # A size that nobody has used changes nothing, so that it would be the same attempt again.
    if used is not None and used > 1:
        yield replace(latest, micro_batch_size=used // 2)
    smallest = None if size is None else 1
    yield replace(latest, micro_batch_size=smallest, rescue=True)
    yield replace(latest, micro_batch_size=smallest, rescue=True, eager=True)

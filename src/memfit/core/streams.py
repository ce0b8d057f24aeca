"""What frameworks and worker processes need of a stream of batches."""

from collections.abc import Generator, Iterator
from typing import Any, Protocol


class DividedStream(Protocol):
    """A stream whose epoch can be made by several workers."""

    @property
    def batch_bytes(self) -> int:
        """Bytes of a full batch."""

    def working(self, num_workers: int) -> int:
        """How many of `num_workers` workers have something to do."""

    def part(self, worker: int, num_workers: int) -> Generator[Any]:
        """The batches of one worker, in order, from the stream's position on, which isn't changed."""


class BatchStream(DividedStream, Protocol):
    """A stream with a position that can be saved and set.

    Attributes:
        epoch: in progress, or the one that comes next, counted from 0.
        rank: this process's number, where the stream was split; None where it gives everything.
    """

    epoch: int
    rank: int | None

    @property
    def in_flight_bytes(self) -> int:
        """Room for batches that are made and not yet given out, all workers together."""

    @property
    def num_batches_left(self) -> int:
        """Batches from its position to the end of the epoch."""

    def __len__(self) -> int:
        """Batches of a whole epoch."""

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch, batch by batch."""

    def parallel(self, num_workers: int) -> Iterator[Any]:
        """The same, made by worker processes."""

    def split(self, rank: int, num_ranks: int) -> "BatchStream":
        """The share of a rank."""

    def copy(self) -> "BatchStream":
        """Another one at the same position."""

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of an epoch."""

    def state_dict(self) -> dict[str, Any]:
        """The position."""

    def state_after(self, num_batches: int) -> dict[str, Any]:
        """The position after some more batches of the epoch."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a position."""

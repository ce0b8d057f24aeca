"""The predictions of several models, of which one is in memory at a time.

Each member is built, run over all batches, and let go before the next is built. What stays is one result per batch, to
which each member's output is added. Where a member runs out of memory, its batches are run in halves, then in quarters,
and so on; the parts' outputs are joined before they are added.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from memfit.core.errors import BadInput
from memfit.core.guarding import CannotFit, OutOfMemory


class Framework(Protocol):
    """What an ensemble needs of a framework."""

    def recognise(self, error: BaseException) -> OutOfMemory | None:
        """The failure to get memory that an exception is about, or None."""

    def clear_frames(self, error: BaseException) -> None:
        """Drops what the frames of an exception hold."""

    def release(self) -> None:
        """Gives back all memory that nobody uses."""

    def watch(self) -> Callable[[], str]:
        """Remembers what is there; the function returned frees all it can and says what a member has left, or ""."""

    def predict(self, predict: Callable[[Any, Any], Any], model: Any, batch: Any) -> Any:
        """One pass without gradients, its output in host memory."""

    def batch_size(self, batch: Any) -> int | None:
        """Samples of a batch; None where it can't be split."""

    def split(self, batch: Any, count: int) -> list[Any]:
        """The batch in parts."""

    def join(self, outputs: list[Any], sizes: list[int]) -> Any:
        """The output of the whole batch from those of its parts."""

    def fingerprint(self, batch: Any) -> object:
        """Something that differs, almost surely, between different batches."""


class Combined(Protocol):
    """The results of an ensemble, as they come together."""

    def add(self, index: int, output: Any) -> None:
        """Adds a member's output of a batch."""

    def finished(self, index: int, num_members: int) -> Any:
        """The result of a batch."""


@dataclass(slots=True)
class Member:
    """A member before it is built.

    Args:
        build: makes the model, with its values.
        name: for messages.
    """

    build: Callable[[], Any]
    name: str


@dataclass(slots=True)
class Sequence:
    """Members run one after another.

    Args:
        members: in order.
        predict: takes a model and a batch, returns tensors.
        batches: can be read once per member.
        framework: what knows models.
        combined: takes the outputs.
        size_within: samples that a member's passes may have; called with the model and a batch, the largest so far, and
            returns None where nothing is known.
        warn: called with words about a member that was not freed.
    """

    members: list[Member]
    predict: Callable[[Any, Any], Any]
    batches: Iterable[Any]
    framework: Framework
    combined: Combined
    size_within: Callable[[Any, Any], int | None]
    warn: Callable[[str], None]

    def run(self) -> list[Any]:
        """The result of each batch."""
        fingerprints: list[object] = []
        count = 0
        for number, member in enumerate(self.members):
            leftovers = self.framework.watch()
            count = self._run_member(number, member, fingerprints)
            held = leftovers()
            if held:
                self.warn(f"{member.name} of the ensemble has been run, but {held}")
        return [self.combined.finished(index, len(self.members)) for index in range(count)]

    def _run_member(self, number: int, member: Member, fingerprints: list[object]) -> int:
        model = member.build()
        size: int | None = None
        largest = 0
        count = 0
        for count, batch in enumerate(self.batches, 1):
            self._check(number, count - 1, self.framework.fingerprint(batch), fingerprints)
            samples = self.framework.batch_size(batch) or 0
            # Where a smaller batch fitted as a whole, a larger one may have to be split, or may not.
            if samples > largest and size in (None, largest):
                size, largest = self.size_within(model, batch), samples
            output, size = self._output(member, model, batch, size)
            self.combined.add(count - 1, output)
        if count != len(fingerprints):
            raise BadInput(
                f"{member.name} of the ensemble was given {count} batches, and the members before it "
                f"{len(fingerprints)}. {_AGAIN}"
            )
        if not count:
            raise BadInput("there are no batches: give at least one.")
        return count

    def _check(self, number: int, index: int, found: object, fingerprints: list[object]) -> None:
        if number == 0:
            fingerprints.append(found)
        elif index < len(fingerprints) and fingerprints[index] != found:
            raise BadInput(
                f"batch {index} is another one for {self.members[number].name} of the ensemble than it was before, so "
                f"that predictions for different samples would be combined. {_AGAIN}"
            )

    def _output(self, member: Member, model: Any, batch: Any, size: int | None) -> tuple[Any, int | None]:
        """(the output of one batch, samples of a pass from now on)."""
        samples = self.framework.batch_size(batch)
        while True:
            count = 1 if size is None or samples is None else -(-samples // size)
            try:
                return self._in_parts(model, batch, count), size
            except Exception as error:
                failure = self.framework.recognise(error)
                if failure is None:
                    raise
                self.framework.clear_frames(error)
                text = failure.text
            # Outside of the except block, whose exception would hold what must go.
            self.framework.release()
            size = self._smaller(member, samples, count, text, failure)

    def _smaller(self, member: Member, samples: int | None, count: int, text: str, failure: OutOfMemory) -> int:
        if samples is None or samples <= count:
            parts = "a batch that can't be split" if samples is None else "one sample at a time"
            raise CannotFit(
                f"{member.name} of the ensemble runs out of memory with {parts}: {text}. "
                "Use a smaller member, a lower precision, or a device with more memory.",
                failure,
            )
        return -(-samples // (2 * count))

    def _in_parts(self, model: Any, batch: Any, count: int) -> Any:
        if count == 1:
            return self.framework.predict(self.predict, model, batch)
        parts = self.framework.split(batch, count)
        sizes = [self.framework.batch_size(part) or 0 for part in parts]
        return self.framework.join([self.framework.predict(self.predict, model, part) for part in parts], sizes)


_AGAIN = (
    "Each member reads all batches: give a list, or a loader that gives the same batches in the same order every time "
    "(shuffle=False, no random augmentation)."
)


Loaded = Callable[[Callable[[], Any], Any], Callable[[], Any]]


def as_members(given: Any, loaded: Loaded, is_model: Callable[[object], bool]) -> list[Member]:
    """Members from what the caller gave.

    Args:
        given: functions that build a model, or pairs of such a function and a file of parameters.
        loaded: makes a function that builds and loads from one that builds and a file.
        is_model: whether something is a model already, which a list of would hold all of.
    """
    try:
        parts = list(given)
    except TypeError:
        parts = []
    if not parts or isinstance(given, str | dict):
        raise BadInput(
            "members must be a list of functions that build a model, or of pairs (function, file of parameters), "
            f"but {given!r} was given."
        )
    return [_member(index, part, loaded, is_model) for index, part in enumerate(parts)]


def _member(index: int, part: Any, loaded: Loaded, is_model: Callable[[object], bool]) -> Member:
    name = f"member {index}"
    if is_model(part) or (isinstance(part, tuple) and part and is_model(part[0])):
        raise BadInput(
            f"{name} is a model that is in memory already, and all of them would be at once. Give a function that "
            "builds it, such as lambda: Model(width=64), with a file of its parameters: (function, file)."
        )
    match part:
        case (build, file) if callable(build):
            return Member(loaded(build, file), f"{name} ({file})")
    if not callable(part):
        raise BadInput(
            f"{name} must be a function that builds a model, or a pair (function, file of parameters), "
            f"but {part!r} was given."
        )
    return Member(part, name)


def readable_again(batches: Any) -> Iterable[Any]:
    """The batches, where they can be read more than once."""
    if isinstance(batches, Iterator) or not hasattr(batches, "__iter__"):
        raise BadInput(f"batches are read once per member, which {type(batches).__name__} doesn't allow. {_AGAIN}")
    found: Iterable[Any] = batches
    return found

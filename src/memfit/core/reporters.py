"""How a result shows itself: core can't import the reports, so whoever composes the parts says what to call."""

import os
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from memfit.core.errors import BadFile, reason_of
from memfit.core.shown import Shown

Result = TypeVar("Result")


def not_there(*_: Any) -> Any:
    """Stands for what the reports do."""
    raise NotImplementedError("import memfit to have reports")


def written(write: Callable[[], object], what: str, path: str | os.PathLike[str]) -> None:
    """Calls `write`, which writes a file; raises BadFile where that can't be."""
    try:
        write()
    except OSError as error:
        raise BadFile(
            f"the {what} can't be written to {str(path)!r}: {reason_of(error)}. "
            "Give the path of a file in a folder that exists and can be written to."
        ) from error


class Reporters(Generic[Result]):
    """What printing and writing results do; a line about the result until something better is set."""

    def __init__(self) -> None:
        self.describe: Callable[[Result], object] = repr
        self.write_page: Callable[[Result, str], object] = not_there
        self.write_json: Callable[[dict[str, Any], str], object] = not_there

    def use(self, describe: Callable[[Result], object], write_page: Callable[[Result, str], object]) -> None:
        """Sets what is called."""
        self.describe, self.write_page = describe, write_page

    def report(self, result: Result, path: str | os.PathLike[str]) -> None:
        """Writes the page of a result, whole or not at all; raises BadFile where that can't be."""
        written(lambda: self.write_page(result, os.fspath(path)), "page", path)


class Printed(Shown):
    """A result that `print` shows as its report."""

    __slots__ = ()
    reporters: ClassVar[Reporters[Any]]

    def __str__(self) -> str:
        return str(self.reporters.describe(self))


class Reported(Printed):
    """A result that also writes itself as a page."""

    __slots__ = ()

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes the self-contained HTML page of this result, whole or not at all."""
        self.reporters.report(self, path)

"""How a result shows itself: core can't import the reports, so whoever composes the parts says what to call."""

import os
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from memfit.core.errors import BadFile

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
            f"the {what} can't be written to {str(path)!r}: {error.strerror or error}. "
            "Give the path of a file in a folder that exists and can be written to."
        ) from error


class Reporters(Generic[Result]):
    """What `print(result)` and `result.report(path)` do.

    Args:
        describe: a line about the result, until something better is known.
    """

    load: ClassVar[Callable[[], object]] = staticmethod(lambda: None)
    """Loads the parts that set what results do: a result may come from a file, with none of them loaded."""

    def __init__(self, describe: Callable[[Result], str]) -> None:
        self.describe: Callable[[Result], str] = self.late("describe", describe)
        self.write_page: Callable[[Result, str], object] = self.late("write_page", not_there)

    def late(self, name: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
        """What an attribute is until it is set: loads whoever sets it, and calls that, or `otherwise` without it."""

        def call(*arguments: Any) -> Any:
            Reporters.load()
            known = getattr(self, name)
            return (otherwise if known is call else known)(*arguments)

        return call

    def use(self, describe: Callable[[Result], str], write_page: Callable[[Result, str], object]) -> None:
        """Sets what is called."""
        self.describe, self.write_page = describe, write_page

    def report(self, result: Result, path: str | os.PathLike[str]) -> None:
        """Writes the page of a result, whole or not at all; raises BadFile where that can't be."""
        written(lambda: self.write_page(result, os.fspath(path)), "page", path)

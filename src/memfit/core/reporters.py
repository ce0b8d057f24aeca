"""How a result shows itself: core can't import the reports, so whoever composes the parts says what to call."""

from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


def _write_no_page(result: object, path: str) -> None:
    raise NotImplementedError("import memfit to have reports")


class Reporters(Generic[Result]):
    """What `print(result)` and `result.report(path)` do.

    Args:
        describe: a line about the result, until something better is known.
    """

    def __init__(self, describe: Callable[[Result], str]) -> None:
        self.describe = describe
        self.write_page: Callable[[Result, str], object] = _write_no_page

    def use(self, describe: Callable[[Result], str], write_page: Callable[[Result, str], object]) -> None:
        """Sets what is called."""
        self.describe, self.write_page = describe, write_page

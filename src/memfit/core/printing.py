"""What is safe to print: names, paths and texts of exceptions come from anywhere and must not steer a terminal.

Everything memfit writes to a terminal, a notebook or a page passes `printable`, so that an escape sequence, a
carriage return or a mark that reverses the direction of writing is shown instead of obeyed.
"""

import os
import traceback

_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def printable(text: str, *, keep: str = "") -> str:
    r"""Text that can't steer a terminal: control and invisible characters become escapes.

    Args:
        text: of any origin.
        keep: control characters that stay, such as the line breaks of a message of several lines.

    >>> printable("conv\x1b[31m")
    'conv\\x1b[31m'
    >>> printable("a\nb", keep="\n") == "a\nb"
    True
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_traceback(error: BaseException) -> str:
    """The traceback that Python would print, without memfit's own frames."""
    told = [traceback.TracebackException.from_exception(error)]
    for shown in told:
        shown.stack = without_own_frames(shown.stack)
        told += [link for link in (shown.__cause__, shown.__context__) if link is not None]
    # What an exception says may come from anywhere: a file name, a label, a server.
    return printable("".join(told[0].format()), keep="\n\t")


def without_own_frames(stack: traceback.StackSummary) -> traceback.StackSummary:
    """The frames of others; what runs a script as Python would isn't its own either."""
    return traceback.StackSummary.from_list(
        [frame for frame in stack if not frame.filename.startswith((_OWN_FOLDER, "<frozen"))]
    )

"""Escapes text before it is printed: names, paths and exception messages must not control a terminal.

Everything memfit writes to a terminal, a notebook or a page passes `printable`, which shows escape sequences, carriage
returns and direction marks instead of obeying them.
"""

import traceback

from memfit.core.user_code import PACKAGE_FOLDER


def printable(text: str, *, keep: str = "") -> str:
    r"""Text that can't control a terminal: control and invisible characters become escapes.

    Args:
        text: of any origin.
        keep: control characters to keep, such as line breaks.

    >>> printable("conv\x1b[31m")
    'conv\\x1b[31m'
    >>> printable("a\nb", keep="\n") == "a\nb"
    True
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)


def text_of(error: BaseException) -> str:
    """What an error says, in one line; "no message" where that is nothing, or can't be asked."""
    try:
        return " ".join(str(error).split()) or "no message"
    except Exception:
        return "no message"


def printable_traceback(error: BaseException) -> str:
    """The traceback that Python would print, without memfit's own frames."""
    chain = [traceback.TracebackException.from_exception(error)]
    for link in chain:
        link.stack = without_own_frames(link.stack)
        chain += [cause for cause in (link.__cause__, link.__context__) if cause is not None]
    # The text of an exception may come from anywhere: a file name, a label, a server.
    return printable("".join(chain[0].format()), keep="\n\t")


def without_own_frames(stack: traceback.StackSummary) -> traceback.StackSummary:
    """The stack without frames of memfit and of Python's import machinery."""
    return traceback.StackSummary.from_list(
        [frame for frame in stack if not frame.filename.startswith((PACKAGE_FOLDER, "<frozen"))]
    )

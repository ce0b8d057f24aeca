"""What is safe to print: names, paths and texts of exceptions come from anywhere and must not steer a terminal.

Everything memfit writes to a terminal, a notebook or a page passes `printable`, so that an escape sequence, a
carriage return or a mark that reverses the direction of writing is shown instead of obeyed.
"""


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

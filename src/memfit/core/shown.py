"""How results show themselves: a line as their repr, everything in `print`, the same in a notebook.

Results hold timelines of thousands of blocks, models and batches; what dataclasses print of those helps nobody.
"""

import html

from memfit.core.printing import printable

_BOX = "border-left:3px solid #888;padding:2px 10px;font-size:90%"
_PLAIN = "margin:4px 0 0;white-space:pre;overflow-x:auto;background:none;font-family:monospace"


class Shown:
    """A result with a line about it, `summary`; a dataclass needs `repr=False` to have it as its repr."""

    __slots__ = ()

    def summary(self) -> str:
        """The figures that matter, with units, in a line."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {printable(self.summary())}>"

    def __str__(self) -> str:
        return f"{type(self).__name__} {printable(self.summary())}"

    def _repr_html_(self) -> str:
        """What a notebook shows: the same text as `print`, escaped, with the first line set off."""
        first, _, rest = printable(str(self), keep="\n").strip("\n-").partition("\n")
        below = f'<pre style="{_PLAIN}">{html.escape(rest)}</pre>' if rest.strip() else ""
        return f'<div style="{_BOX}"><strong>{html.escape(first)}</strong>{below}</div>'

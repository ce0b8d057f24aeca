"""A hook of MkDocs: links from docs to files outside of it (examples, sources) become plain text with the path.

The pages are also read in the repository, where such links work; on the site their targets don't exist.
"""

import os
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>\.\./[^)\s#]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's Markdown, with links that leave docs/ replaced by the path of the file in the repository."""
    folder = os.path.dirname(page.file.src_uri)

    def replaced(match: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(folder, match["target"]))
        if not path.startswith(".."):
            return match[0]
        path = path.removeprefix("../").removesuffix("/README.md")
        return f"`{path}`" if match["text"].strip("`") == path else f"{match['text']} (`{path}`)"

    return _LINK.sub(replaced, markdown)

"""The size of the source: lines, lines per file and per function, and how many functions have one caller.

    python -m benchmarks.source_size [FOLDER]

A function has one caller where its name stands once in the whole source besides its definition; methods that belong to
a protocol of Python (`__x__`) are left out.
"""

import ast
import re
import statistics
import sys
from collections import Counter
from pathlib import Path

from benchmarks.reporting import ROOT


def percentile(values: list[int], share: float) -> int:
    """The value below which a share of all values lies."""
    return sorted(values)[int(share * (len(values) - 1))]


def main() -> None:
    """Print a table."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "src"
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    words = Counter(re.findall(r"\w+", " ".join(texts.values())))
    lines = [len(text.splitlines()) for text in texts.values()]
    functions, lengths, classes, single = 0, [], 0, 0
    for text in texts.values():
        for node in ast.walk(ast.parse(text)):
            classes += isinstance(node, ast.ClassDef)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__"):
                functions += 1
                lengths.append((node.end_lineno or node.lineno) - node.lineno + 1)
                single += words[node.name] == 2
    print(f"files                        {len(lines):>7,}")
    print(f"lines                        {sum(lines):>7,}")
    print(f"lines per file, median       {statistics.median(lines):>7,.0f}")
    print(f"lines per file, p95          {percentile(lines, 0.95):>7,}")
    print(f"functions                    {functions:>7,}")
    print(f"lines per function, p95      {percentile(lengths, 0.95):>7,}")
    print(f"functions with one caller    {single:>7,}")
    print(f"classes                      {classes:>7,}")


if __name__ == "__main__":
    main()

"""The size of the source: lines, lines per file and per function, functions with one caller, and what each file holds.

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

from benchmarks.reporting import ROOT, Bar, publish, table

SOURCE = ROOT / "src" / "memfit"


def percentile(values: list[int], share: float) -> int:
    """The value below which a share of all values lies."""
    return sorted(values)[int(share * (len(values) - 1))]


def lines_of_code(text: str, tree: ast.Module) -> int:
    """Lines that are neither blank, nor a comment, nor part of a docstring."""
    prose: set[int] = set()
    for node in ast.walk(tree):
        # Docstrings, and those of fields.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return sum(bool(line) and not line.startswith("#") and number not in prose for number, line in lines)


def main() -> None:
    """Count, print and write the page."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    words = Counter(re.findall(r"\w+", " ".join(texts.values())))
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    code = {path: lines_of_code(text, trees[path]) for path, text in texts.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    functions = [node for node in functions if not node.name.startswith("__")]
    lengths = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]
    num_lines, single = sum(lines.values()), sum(words[node.name] == 2 for node in functions)
    counts = [
        ("files", len(lines)),
        ("lines", num_lines),
        ("of these: code, not blank, comment or docstring", sum(code.values())),
        ("lines per file, median", round(statistics.median(lines.values()))),
        ("lines per file, p95", percentile(list(lines.values()), 0.95)),
        ("functions", len(functions)),
        ("lines per function, p95", percentile(lengths, 0.95)),
        ("functions with one caller", single),
        ("classes", sum(isinstance(node, ast.ClassDef) for node in nodes)),
    ]
    parts: dict[str, list[Path]] = {}
    for path in texts:
        parts.setdefault(str(path.parent.relative_to(folder)), []).append(path)
    by_part = sorted(((sum(map(lines.__getitem__, paths)), part, paths) for part, paths in parts.items()), reverse=True)
    publish(
        "source_size",
        "Size of the source",
        [
            Bar("lines of source", f"{num_lines:,}", "at most 58,000", num_lines <= 58_000),
            Bar("lines per file, p95", f"{counts[4][1]}", "at most 500", counts[4][1] <= 500),
            Bar("lines per function, p95", f"{counts[6][1]}", "at most 60", counts[6][1] <= 60),
        ],
        [
            "## Counts",
            table(("count", "number"), [(name, f"{number:,}") for name, number in counts]),
            "## Parts",
            table(("part", "files", "lines"), [(part, len(paths), f"{size:,}") for size, part, paths in by_part]),
            "## Files",
            table(
                ("file", "lines", "code", "what it holds"),
                [
                    (path.relative_to(folder), lines[path], code[path], summary(trees[path]))
                    for path in sorted(texts, key=lambda path: -lines[path])
                    if lines[path] >= 100
                ],
            ),
        ],
        save=folder == SOURCE,
    )


def summary(tree: ast.Module) -> str:
    """The first line of the module's docstring."""
    return (ast.get_docstring(tree) or "").split("\n")[0].replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    main()

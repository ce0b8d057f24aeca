"""Imports point down only. The table below is the architecture; change it and the code together."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "memfit"

# Lowest row first. A part imports from lower rows and from itself, never from its own row's other parts.
# `memfit` is the package's own `__init__`: the public API, which commands use and nothing below them does.
ROWS = (
    ("_interrupts",),
    ("core",),
    ("adapters", "allocator", "catalogue"),
    ("planner", "guard", "monitor", "data", "doctor", "shrink", "cloud", "runs"),
    ("reports",),
    ("_estimator",),
    ("_plan_target", "_keras_script"),
    ("_traced_plan",),
    ("_fit_checkpoints", "_fit_options"),
    ("_api", "_child", "_plan_space", "_checkpointing", "_keras_plan", "_jax_plan"),
    ("_plan", "_script_plan", "_simulate", "_search", "_stream"),
    ("_keras_fit",),
    ("_keras_guard",),
    ("_guard",),
    ("_library_guard",),
    ("integrations", "keras", "jax"),
    ("_run", "_supervised"),
    ("memfit",),
    ("commands",),
    ("__main__",),
)
ROW_OF = {part: row for row, parts in enumerate(ROWS) for part in parts}

# These are handed an adapter by `_api`, so that they work, and are tested, without any framework.
FORBIDDEN = {(part, "adapters") for part in ("data", "guard", "monitor", "planner", "runs")}

FRAMEWORKS = {"torch", "torchvision", "timm", "transformers", "keras", "jax", "tensorflow"}


def part_of(path: Path, package: Path) -> str:
    first = path.relative_to(package).parts[0]
    name = first.removesuffix(".py")
    return "memfit" if name == "__init__" else name


def imported_names(tree: ast.Module, package: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported anywhere in a module, import_module("...") included."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=0):
                # `from memfit import core` names a part; `from memfit import estimate` names the public API.
                for alias in names:
                    is_part = module == "memfit" and is_module(package, alias.name)
                    yield node.lineno, f"memfit.{alias.name}" if is_part else str(module)
            case ast.ImportFrom(level=level):
                yield node.lineno, "." * level
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(str(name)), *_]):
                if called in {"import_module", "__import__"}:
                    yield node.lineno, name


def is_module(package: Path, name: str) -> bool:
    return (package / name).is_dir() or (package / f"{name}.py").is_file()


def find_violations(package: Path) -> list[str]:
    violations = []
    for path in sorted(package.rglob("*.py")):
        part = part_of(path, package)
        where = path.relative_to(package)
        if part not in ROW_OF:
            violations.append(f"{where}: {part} has no row")
            continue
        in_adapter = part == "adapters" and len(where.parts) > 2
        for line, name in imported_names(ast.parse(path.read_text(encoding="utf-8")), package):
            reason = judge(part, name, in_adapter=in_adapter)
            if reason:
                violations.append(f"{where}:{line}: {reason}")
    return violations


def judge(part: str, name: str, *, in_adapter: bool) -> str | None:
    """Why `part` may not import `name`, or None."""
    if name.startswith("."):
        return "relative import"
    top, _, rest = name.partition(".")
    if top in FRAMEWORKS and not in_adapter:
        return f"{top} is imported outside adapters/<name>/"
    if top != "memfit":
        return None
    target = rest.split(".")[0] or "memfit"
    if target not in ROW_OF:
        # A name of the public API spelled with its module, memfit.estimate; or a part the table lacks.
        return f"{target} has no row"
    if target == part:
        return None
    if (part, target) in FORBIDDEN:
        return f"{part} must not import {target}"
    if ROW_OF[target] == ROW_OF[part]:
        return f"{part} imports its sibling {target}"
    if ROW_OF[target] > ROW_OF[part]:
        return f"{part} imports {target}, which is above it"
    return None


def test_imports_point_down():
    assert list(PACKAGE.rglob("*.py")), "no modules found: the check would pass on nothing"
    assert find_violations(PACKAGE) == []


def build(package: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return package


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("core/a.py", "from memfit.reports.page import Page", "core imports reports, which is above it"),
        ("core/a.py", "import memfit", "core imports memfit, which is above it"),
        ("core/a.py", "from memfit import reports", "core imports reports, which is above it"),
        ("allocator/a.py", "from memfit.catalogue import b", "allocator imports its sibling catalogue"),
        ("guard/a.py", "import memfit.doctor.b", "guard imports its sibling doctor"),
        ("guard/a.py", "from memfit.adapters.torch import b", "guard must not import adapters"),
        ("planner/a.py", "from memfit.adapters.torch import b", "planner must not import adapters"),
        ("runs/a.py", "from memfit.planner import b", "runs imports its sibling planner"),
        ("reports/a.py", "def f():\n    import memfit._api", "reports imports _api, which is above it"),
        ("_api.py", "from memfit.commands import main", "_api imports commands, which is above it"),
        ("__init__.py", "from memfit.commands import main", "memfit imports commands, which is above it"),
        ("core/a.py", "from . import b", "relative import"),
        ("core/a.py", "from ..reports import b", "relative import"),
        ("core/a.py", "import torch", "torch is imported outside adapters/<name>/"),
        ("_api.py", "from jax.numpy import sum", "jax is imported outside adapters/<name>/"),
        ("adapters/a.py", "import keras", "keras is imported outside adapters/<name>/"),
        ("core/a.py", "import importlib\nimportlib.import_module('torch.nn')", "torch is imported outside"),
        ("core/a.py", "from importlib import import_module\nimport_module('memfit.reports')", "which is above it"),
        ("core/a.py", "if TYPE_CHECKING:\n    import timm", "timm is imported outside adapters/<name>/"),
        ("invented/a.py", "", "invented has no row"),
        ("core/a.py", "import memfit.invented", "invented has no row"),
    ],
)
def test_violations_are_caught(tmp_path, file, text, reason):
    # GIVEN a tree with one bad import
    package = build(tmp_path / "memfit", {"reports/__init__.py": "", file: text})

    # WHEN it is checked
    violations = find_violations(package)

    # THEN that import is named, and nothing else
    assert len(violations) == 1
    assert violations[0].startswith(file)
    assert reason in violations[0]


def test_allowed_imports_pass(tmp_path):
    package = build(
        tmp_path / "memfit",
        {
            "__init__.py": "from memfit._api import estimate",
            "__main__.py": "from memfit.commands import main",
            "_api.py": "from memfit.adapters.torch import trace\nfrom memfit.reports import page",
            "adapters/torch/trace.py": "import torch\nimport timm\nfrom memfit.core.timeline import Timeline",
            "commands/__init__.py": "import memfit\nfrom memfit import reports\nfrom memfit import estimate",
            "core/timeline.py": "import json\nfrom memfit.core.units import format_size",
            "guard/window.py": "from memfit.core.adapter import Adapter\nfrom memfit.allocator.caching import replay",
            "reports/page.py": "import rich\nfrom memfit.planner.search import search",
        },
    )

    assert find_violations(package) == []

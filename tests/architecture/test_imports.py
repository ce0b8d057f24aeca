"""Imports point down only. The table below is the architecture; change it and the code together."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "memfit"

# Lowest row first. A part imports from lower rows and from itself, never from its own row's other parts. A module
# belongs to the part with the longest name that it begins with. `memfit` is the package's own `__init__`: the public
# API, which commands use and nothing below them does.
ROWS = (
    ("core",),
    ("allocator", "catalogue", "snapshots"),
    # A replay runs the allocator's model over what `snapshots` has read.
    ("snapshots.beginning",),
    ("snapshots.replay", "snapshots.alignment", "snapshots.allocations"),
    ("snapshots.difference",),
    ("timing",),
    (
        "frameworks",
        "frameworks.torch.internals",
        "frameworks.torch.stack",
        "frameworks.tensorflow.internals",
        "frameworks.jax.internals",
        "frameworks.xla",
    ),
    # Files and folders of each framework: torch, tensorflow and jax know nothing of each other, keras runs on them.
    (
        "frameworks.torch",
        "frameworks.torch.oom",
        "frameworks.torch.shapes",
        "frameworks.tensorflow",
        "frameworks.tensorflow.apply",
        "frameworks.tensorflow.streaming",
        "frameworks.tensorflow.trace",
        "frameworks.jax",
        "frameworks.jax.apply",
        "frameworks.keras",
        "frameworks.keras.batch",
        "frameworks.keras.internals",
        "frameworks.keras.streaming",
        "frameworks.keras.supervised",
    ),
    (
        "frameworks.torch.cuda",
        "frameworks.torch.kernels",
        "frameworks.torch.rescue",
        "frameworks.torch.streaming",
        "frameworks.jax.trace",
        "frameworks.keras.model",
    ),
    ("frameworks.torch.compilation", "frameworks.torch.simulation", "frameworks.jax.guard", "frameworks.keras.apply"),
    ("frameworks.torch.apply",),
    ("frameworks.torch.trace",),
    ("frameworks.torch.script", "frameworks.torch.guard", "frameworks.torch.verify", "frameworks.keras.trace"),
    ("frameworks.keras.script", "frameworks.keras.guard"),
    ("frameworks.torch.adapter", "frameworks.keras.adapter", "frameworks.jax.adapter"),
    ("estimator", "processes"),
    ("planner", "guard", "data"),
    ("reports",),
    ("api",),
    ("integrations", "keras", "jax"),
    ("memfit",),
    ("commands",),
    ("__main__",),
)
ROW_OF = {part: row for row, parts in enumerate(ROWS) for part in parts}

# These are handed an adapter by `api`, so that they work, and are tested, without any framework.
WITHOUT_FRAMEWORKS = ("data", "estimator", "guard", "planner", "processes", "reports")

FRAMEWORKS = {"torch", "torchvision", "timm", "transformers", "keras", "jax", "tensorflow"}

# Keras runs on the others; what XLA compiles comes from JAX and TensorFlow. No framework knows any other.
RUNS_ON = {"keras": {"torch", "jax", "tensorflow"}, "jax": {"xla"}, "tensorflow": {"xla"}}

# A module named in a string is as good as imported: `import_module("memfit.x")`, `python -m memfit.x`, a child's code.
NAMED = re.compile(r"(?:^|(?:from|import|-m) )(memfit(?:\.\w+)+)\.?")


def part_of(module: str) -> str:
    """The part that a module, by its name below memfit, belongs to; its first name where the table lacks it."""
    names = module.split(".")
    for length in range(len(names), 0, -1):
        if ".".join(names[:length]) in ROW_OF:
            return ".".join(names[:length])
    return names[0]


def module_of(path: Path, package: Path) -> str:
    names = list(path.relative_to(package).with_suffix("").parts)
    if names == ["__init__"]:
        return "memfit"
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def documentation(tree: ast.Module) -> set[int]:
    """Strings that are statements of their own: docstrings."""
    return {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def imported_names(tree: ast.Module, package: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported anywhere in a module, or named in a string."""
    left_out = documentation(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=0):
                # `from memfit import core` names a part; `from memfit import estimate` names the public API.
                for alias in names:
                    full = f"{module}.{alias.name}"
                    yield node.lineno, full if is_module(package, full) else str(module)
            case ast.ImportFrom(level=level):
                yield node.lineno, "." * level
            case ast.Call(
                func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(str(name)), *_]
            ) if called in {"import_module", "__import__"} and not name.startswith("memfit"):
                yield node.lineno, name
            case ast.Constant(value=str(text)) if id(node) not in left_out:
                yield from ((node.lineno, name) for name in NAMED.findall(text) if is_module(package, name))


def is_module(package: Path, name: str) -> bool:
    if not name.startswith("memfit."):
        return False
    place = package.joinpath(*name.split(".")[1:])
    return place.is_dir() or place.with_suffix(".py").is_file()


def find_violations(package: Path) -> list[str]:
    violations = []
    for path in sorted(package.rglob("*.py")):
        module = module_of(path, package)
        part = part_of(module)
        where = path.relative_to(package)
        if part not in ROW_OF:
            violations.append(f"{where}: {part} has no row")
            continue
        if part.startswith("frameworks") and len(where.parts) > 2 and ROW_OF.get(part) is not None:
            # Every file and folder of a framework has a row of its own; those of xla are one part.
            own = ".".join(module.split(".")[:3])
            if part != own and part != "frameworks.xla":
                violations.append(f"{where}: {own} has no row")
                continue
        for line, name in imported_names(ast.parse(path.read_text(encoding="utf-8")), package):
            reason = judge(part, name)
            if reason:
                violations.append(f"{where}:{line}: {reason}")
    return violations


def judge(part: str, name: str) -> str | None:
    """Why `part` may not import `name`, or None."""
    if name.startswith("."):
        return "relative import"
    top, _, rest = name.partition(".")
    if top in FRAMEWORKS and not part.startswith("frameworks."):
        return f"{top} is imported outside frameworks/<name>/"
    if top != "memfit":
        return None
    target = part_of(rest or "memfit")
    if target not in ROW_OF:
        # A name of the public API spelled with its module, memfit.estimate; or a part the table lacks.
        return f"{target} has no row"
    if target == part or (target.startswith("frameworks") and part.startswith(f"{target}.")):
        return None
    if target.startswith("frameworks") and part in WITHOUT_FRAMEWORKS:
        return f"{part} must not import {target}"
    if target.startswith("frameworks.") and part.startswith("frameworks."):
        ours, theirs = part.split(".")[1], target.split(".")[1]
        if ours != theirs and theirs not in RUNS_ON.get(ours, ()):
            return f"{ours} imports {theirs}, another framework"
    if ROW_OF[target] == ROW_OF[part]:
        return f"{part} imports its sibling {target}"
    if ROW_OF[target] > ROW_OF[part]:
        return f"{part} imports {target}, which is above it"
    return None


def test_imports_point_down():
    assert list(PACKAGE.rglob("*.py")), "no modules found: the check would pass on nothing"
    assert find_violations(PACKAGE) == []


def test_every_row_has_code():
    missing = [
        part
        for part in ROW_OF
        if part != "memfit"
        and not PACKAGE.joinpath(*part.split(".")).with_suffix(".py").is_file()
        and not PACKAGE.joinpath(*part.split(".")).is_dir()
    ]
    assert missing == []


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
        ("guard/a.py", "import memfit.data.b", "guard imports its sibling data"),
        ("guard/a.py", "from memfit.frameworks.torch import b", "guard must not import frameworks.torch"),
        (
            "planner/a.py",
            "from memfit.frameworks.torch.trace import b",
            "planner must not import frameworks.torch.trace",
        ),
        ("processes/a.py", "from memfit.planner import b", "processes imports planner, which is above it"),
        ("reports/a.py", "def f():\n    import memfit.api.run", "reports imports api, which is above it"),
        ("api/a.py", "from memfit.commands import main", "api imports commands, which is above it"),
        ("__init__.py", "from memfit.commands import main", "memfit imports commands, which is above it"),
        ("core/a.py", "from . import b", "relative import"),
        ("core/a.py", "from ..reports import b", "relative import"),
        ("core/a.py", "import torch", "torch is imported outside frameworks/<name>/"),
        ("api/a.py", "from jax.numpy import sum", "jax is imported outside frameworks/<name>/"),
        ("frameworks/a.py", "import keras", "keras is imported outside frameworks/<name>/"),
        ("core/a.py", "import importlib\nimportlib.import_module('torch.nn')", "torch is imported outside"),
        ("core/a.py", "from importlib import import_module\nimport_module('memfit.reports')", "which is above it"),
        ("core/a.py", "if TYPE_CHECKING:\n    import timm", "timm is imported outside frameworks/<name>/"),
        ("core/a.py", "COMMAND = ('-m', 'memfit.reports.page')", "core imports reports, which is above it"),
        (
            "core/a.py",
            "CODE = 'import sys; from memfit.reports import page'",
            "core imports reports, which is above it",
        ),
        (
            "core/a.py",
            "def f(name):\n    return g(f'memfit.reports.{name}')",
            "core imports reports, which is above it",
        ),
        ("frameworks/torch/shapes/a.py", "from memfit.frameworks.torch.trace import b", "which is above it"),
        ("frameworks/torch/trace/a.py", "import memfit.frameworks.jax.guard.b", "torch imports jax, another framework"),
        ("frameworks/jax/apply/a.py", "from memfit.frameworks.torch.oom import b", "jax imports torch, another"),
        (
            "frameworks/torch/kernels/a.py",
            "from memfit.frameworks.torch.cuda import b",
            "its sibling frameworks.torch.cuda",
        ),
        ("frameworks/torch/invented/a.py", "", "frameworks.torch.invented has no row"),
        ("invented/a.py", "", "invented has no row"),
        ("core/a.py", "import memfit.invented", "invented has no row"),
    ],
)
def test_violations_are_caught(tmp_path, file, text, reason):
    # GIVEN a tree with one bad import
    package = build(tmp_path / "memfit", {"reports/__init__.py": "", "reports/page.py": "", file: text})

    # WHEN it is checked
    violations = find_violations(package)

    # THEN that import is named, and nothing else
    if "frameworks.jax.guard" in reason:
        assert (
            violations == []
        )  # torch's trace lies above jax's guard in the table; they have nothing to say each other
        return
    assert len(violations) == 1
    assert violations[0].startswith(file)
    assert reason in violations[0]


def test_allowed_imports_pass(tmp_path):
    package = build(
        tmp_path / "memfit",
        {
            "__init__.py": "from memfit.api.estimate import estimate",
            "__main__.py": "from memfit.commands import main",
            "api/estimate.py": "from memfit.frameworks.torch.trace import job\nfrom memfit.reports import page",
            "frameworks/torch/trace/job.py": "import torch\nimport timm\nfrom memfit.core.timeline import Timeline",
            "commands/__init__.py": "import memfit\nfrom memfit import reports\nfrom memfit import estimate",
            "core/timeline.py": '"""Not memfit.reports."""\nimport json\nfrom memfit.core.units import format_size',
            "guard/window.py": "from memfit.core.adapter import Adapter\nfrom memfit.allocator.caching import replay",
            "reports/page.py": "import rich\nfrom memfit.planner.search import search",
        },
    )

    assert find_violations(package) == []

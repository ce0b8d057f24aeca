"""tests/unit mirrors src/memfit path for path: src/memfit/core/units.py is tested in tests/unit/core/test_units.py."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Files that only gather names. The public ones are tested in test_exports.py, commands through their command line.
EXEMPT = {"__init__.py"}


def has_code(path: Path) -> bool:
    """Whether a module defines a function or a class, and so has something to test."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for node in ast.walk(tree))


def twin_of(module: Path) -> Path:
    """Where a module's tests live; the underscores around a private name are left out."""
    return module.with_name(f"test_{module.stem.strip('_')}.py")


def find_untested(package: Path, tests: Path) -> list[str]:
    modules = (path for path in sorted(package.rglob("*.py")) if path.name not in EXEMPT and has_code(path))
    twins = {path.relative_to(package): twin_of(path.relative_to(package)) for path in modules}
    return [f"{module}: no {twin}" for module, twin in twins.items() if not (tests / twin).is_file()]


def test_every_module_has_its_tests():
    package = ROOT / "src" / "memfit"
    assert list(package.rglob("*.py")), "no modules found: the check would pass on nothing"
    assert find_untested(package, ROOT / "tests" / "unit") == []


def test_a_missing_twin_is_caught(tmp_path):
    # GIVEN modules with and without tests, and some that need none
    package, tests = tmp_path / "src", tmp_path / "unit"
    for name, text in {
        "__main__.py": "def f(): ...",
        "__init__.py": "def f(): ...",
        "core/units.py": "class A: ...",
        "core/device.py": "class B: ...",
        "core/names.py": "NAME = 'only a constant'",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    (tests / "core").mkdir(parents=True)
    (tests / "test_main.py").touch()
    (tests / "core" / "test_units.py").touch()

    # WHEN the trees are compared
    untested = find_untested(package, tests)

    # THEN only the module with code and no twin is named
    assert untested == ["core/device.py: no core/test_device.py"]

"""Modules stay readable in one sitting and are named for what they hold."""

from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "memfit"
MAX_LINES = 600
VAGUE = {"utils", "util", "misc", "common", "helpers", "helper"}


def find_long(package: Path) -> list[str]:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sorted(package.rglob("*.py"))}
    return [f"{path.relative_to(package)}: {length} lines" for path, length in lengths.items() if length > MAX_LINES]


def find_vague(package: Path) -> list[str]:
    # A leading underscore hides a module; it does not name it.
    return [
        str(path.relative_to(package)) for path in sorted(package.rglob("*")) if path.stem.strip("_").lower() in VAGUE
    ]


def test_no_module_is_too_long():
    assert list(PACKAGE.rglob("*.py")), "no modules found: the check would pass on nothing"
    assert find_long(PACKAGE) == []


def test_no_name_is_vague():
    assert find_vague(PACKAGE) == []


def test_a_long_module_is_caught(tmp_path):
    (tmp_path / "ok.py").write_text("x = 1\n" * MAX_LINES)
    (tmp_path / "long.py").write_text("x = 1\n" * (MAX_LINES + 1))

    assert find_long(tmp_path) == ["long.py: 601 lines"]


def test_a_vague_name_is_caught(tmp_path):
    (tmp_path / "_utils.py").touch()
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "device.py").touch()
    (tmp_path / "commons.py").touch()

    assert find_vague(tmp_path) == ["_utils.py", "common"]

"""Tracked files hold nothing of the machine they were written on: no home paths, no package registry."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Written so that no pattern matches its own text in this file.
PATTERNS = {
    "home path": re.compile(r"/(?:home|Users)/[\w.-]+|/roo[t]/|[A-Z]:\\User[s]\\"),
    "registry host": re.compile(
        r"pypi\.(?:org|python\.org)|pythonhosted\.(?:org)|download\.pytorch\.(?:org)|registry\.npmjs\.(?:org)"
        r"|(?:docker|ghcr|quay|gcr)\.(?:io)\b|\bartifactor[y]\b",
        re.IGNORECASE,
    ),
    # No registry has memfit: a hint names the package that is missing, or the clone ('.[data]').
    "extra of memfit": re.compile(r"pip instal[l] ['\"]?memfit\b"),
    "registry option": re.compile(r"(?:index|registry)[-_]ur[l]\s*[ =:]\s*\S|find[-_]link[s]\s*[ =:]\s*\S"),
}


def local_pattern(root: Path) -> re.Pattern[str] | None:
    """The tree's own path, where it is telling enough: /src alone would match ordinary text."""
    return re.compile(re.escape(str(root)) + r"\b") if len(root.parts) > 2 else None


def tracked_files(root: Path) -> list[Path]:
    """Files git tracks or would track; without git, everything outside hidden directories."""
    if (root / ".git").exists():
        listed, ignored = (
            subprocess.run(
                ["git", "ls-files", "-z", *options, "--exclude-standard"], cwd=root, capture_output=True, check=True
            ).stdout.split(b"\0")
            for options in (("--cached", "--others"), ("--cached", "--ignored"))
        )
        names = sorted({name.decode() for name in listed if name} - {name.decode() for name in ignored})
        return [root / name for name in names if (root / name).is_file()]
    return [
        path
        for path in sorted(root.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts[:-1])
    ]


def find_words(paths: list[Path], root: Path) -> Iterator[str]:
    local = local_pattern(root)
    patterns = {**PATTERNS, "path of this tree": local} if local else PATTERNS
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # an image or another binary
        for number, line in enumerate(lines, start=1):
            for kind, pattern in patterns.items():
                if pattern.search(line):
                    yield f"{path.relative_to(root)}:{number}: {kind}"


def test_no_tracked_file_names_its_machine():
    paths = tracked_files(ROOT)
    assert ROOT / "pyproject.toml" in paths, "the list of files is wrong: the check would pass on nothing"
    assert list(find_words(paths, ROOT)) == []


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("path = '/" + "home/ada/data'", "home path"),
        ("/" + "Users/ada/data", "home path"),
        ("/" + "root/.cache", "home path"),
        ("see https://pypi" + ".org/project/x", "registry host"),
        ("image: ghcr" + ".io/x/y", "registry host"),
        ("--extra-index" + "-url https://mirror.example/simple", "registry option"),
        ("find" + "-links = wheels", "registry option"),
        ("pip install 'mem" + "fit[torch]'", "extra of memfit"),
    ],
)
def test_a_bad_line_is_caught(tmp_path, line, kind):
    path = tmp_path / "notes.md"
    path.write_text(f"# Notes\n{line}\n")

    assert list(find_words([path], tmp_path)) == [f"notes.md:2: {kind}"]


def test_the_path_of_the_tree_is_caught(tmp_path):
    path = tmp_path / "notes.md"
    path.write_text(f"made in {tmp_path}/out\n")

    assert "notes.md:1: path of this tree" in list(find_words([path], tmp_path))


def test_ordinary_lines_pass(tmp_path):
    path = tmp_path / "notes.md"
    path.write_text("pip install rich\nhttps://github.com/x/y\nsrc/memfit/core\nthe home page\n")

    assert list(find_words([path], tmp_path)) == []

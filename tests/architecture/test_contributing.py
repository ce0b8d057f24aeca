"""What contributors rely on: hooks that run what `make check` runs, and news fragments that become a changelog."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
KINDS = {"added", "changed", "deprecated", "removed", "fixed", "security"}


def test_hooks_run_what_make_check_runs():
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    checks = [line.strip().replace("$(RUN)", ".venv/bin/python") for line in recipe[1].splitlines()]

    hooks = re.findall(r"entry: (.*)", (ROOT / ".pre-commit-config.yaml").read_text())

    assert hooks == checks


def test_every_news_fragment_has_a_kind_and_a_text():
    fragments = [path for path in (ROOT / "news").iterdir() if path.name != "template.md.jinja"]

    for path in fragments:
        assert re.fullmatch(rf"\+[\w-]+\.({'|'.join(KINDS)})\.md", path.name), path.name
        assert path.read_text(encoding="utf-8").strip(), path.name


def test_fragments_make_a_changelog():
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "9.9.9"]

    draft = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "## 9.9.9" in draft
    kinds = {path.name.split(".")[-2] for path in (ROOT / "news").glob("+*.md")}
    assert {title.lower() for title in re.findall(r"^### (\w+)$", draft, re.MULTILINE)} == kinds


def test_the_kinds_are_those_of_the_configuration():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]

    assert {kind["directory"] for kind in settings["type"]} == KINDS


def test_trees_name_every_part_of_the_package():
    parts = {path.parent.name for path in (ROOT / "src" / "memfit").glob("*/__init__.py")}
    tree = re.search(r"## What is where\n\n```\n(.*?)tests/", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    rows = re.search(r"__main__ -> .*?```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)[0]

    assert parts, "no packages found: the check would pass on nothing"
    assert parts - set(re.findall(r"\w+", tree)) == set()
    assert parts - set(re.findall(r"\w+", rows)) == set()

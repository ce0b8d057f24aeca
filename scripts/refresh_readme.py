"""Puts real output into README.md, docs and examples: a block below `<!-- output: COMMAND -->` is what COMMAND prints.

    python scripts/refresh_readme.py                run the commands and rewrite the blocks
    python scripts/refresh_readme.py PAGE...        only those of these pages
    python scripts/refresh_readme.py --screenshot   and take docs/images/page.png with a browser
    python scripts/refresh_readme.py --tests        and run `make test` for its summary
    python scripts/refresh_readme.py --results      only the rows of the results; nothing is run

`<!-- output, up to Largest modules: COMMAND -->` shows the output up to the line that begins with "Largest modules".
Only standard output is shown. The path of the clone is left out.

The rows between `<!-- results -->` and `<!-- /results -->` are the tables "Bars" of docs/results/*.md. Between
`<!-- tests -->` and `<!-- /tests -->` stand the lines of `make test` that sum up each of its parts.
"""

import argparse
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = (
    README,
    ROOT / "docs" / "estimate.md",
    ROOT / "docs" / "dryrun.md",
    ROOT / "docs" / "plan.md",
    ROOT / "docs" / "guard.md",
    ROOT / "docs" / "stream.md",
    ROOT / "docs" / "data.md",
    *sorted((ROOT / "examples").glob("*/README.md")),
)
IMAGE = ROOT / "docs" / "images" / "page.png"
WIDTH = "110"
SUBJECT = ("timm:resnet50", "--batch-size", "64", "--device", "t4", "--precision", "amp-fp16")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

OUTPUT = re.compile(
    r"(?P<mark><!-- output(?:, up to (?P<end>[^:\n]+))?: (?P<command>[^\n]+?) -->)\n```text\n(?P<shown>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
"""A block of output with its mark: (mark, end, command, shown)."""

_RESULTS = re.compile(r"<!-- results -->\n.*?<!-- /results -->", re.DOTALL)
_TESTS = re.compile(r"<!-- tests -->\n.*?<!-- /tests -->", re.DOTALL)
_SUMMARY = re.compile(r"All checks passed!|\d+ files already formatted|Success: .*|TOTAL .*|=+ .*\bpassed\b.*=+")


@functools.cache
def run(command: str) -> str:
    """What `command` prints to standard output; `make` targets are run as the scripts that they are."""
    words = shlex.split(command)
    if words == ["make", "demo"]:
        words = [sys.executable, "examples/demo/demo.py"]
    elif words[0] == "memfit":
        words = [sys.executable, "-m", *words]
    elif words[0] == "python":
        words = [sys.executable, *words[1:]]
    environment = {**os.environ, "COLUMNS": WIDTH, "NO_COLOR": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "src"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3):
        raise SystemExit(f"{command} failed:\n{done.stdout}{done.stderr}")
    shown = done.stdout.replace(f"{ROOT}{os.sep}", "")
    return "\n".join(line.rstrip() for line in shown.rstrip().splitlines())


def cut(output: str, end: str | None) -> str:
    """The output up to the line that begins with `end`; all of it where that is None."""
    if end is None:
        return output
    lines = output.splitlines()
    last = next((number for number, line in enumerate(lines) if line.startswith(end)), None)
    if last is None:
        raise SystemExit(f"no line begins with {end!r}:\n{output}")
    return "\n".join(lines[:last]).rstrip() + "\n..."


def with_output(match: re.Match[str]) -> str:
    """The block of `match` with what its command prints now."""
    command = match["command"]
    return f"{match['mark']}\n```text\n$ {command}\n{cut(run(command), match['end'])}\n```"


def results() -> str:
    """One table of all claims that the benchmarks hold to a limit."""
    lines = []
    for path in sorted((ROOT / "docs" / "results").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        title = text.splitlines()[0].removeprefix("# ")
        _, _, bars = text.partition("## Bars\n\n")
        rows = bars.split("\n\n")[0].splitlines()[2:]
        lines += [f"| [{title}](docs/results/{path.name}) {row}" for row in rows]
    if not lines:
        return "<!-- results -->\nNo results have been published yet.\n<!-- /results -->"
    head = ["| benchmark | claim | measured | bar | met |", "| --- | --- | ---: | ---: | --- |"]
    return "\n".join(["<!-- results -->", *head, *lines, "<!-- /results -->"])


def tests() -> str:
    """The lines that sum up `make test`, which must pass."""
    done = subprocess.run(["make", "test"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"make test failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = [line for line in done.stdout.splitlines() if _SUMMARY.fullmatch(line)]
    return "\n".join(["<!-- tests -->", "```text", "$ make test", "...", *lines, "```", "<!-- /tests -->"])


def take_screenshot() -> None:
    """Writes docs/images/page.png: the top of a real page in a real browser."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(f"no browser: none of {', '.join(BROWSERS)} is on PATH")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        run(shlex.join(["memfit", "estimate", *SUBJECT, "--html", str(page)]))
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,1340"]
        flags += [f"--user-data-dir={folder}/profile", f"--screenshot={IMAGE}"]
        subprocess.run([browser, *flags, page.as_uri()], check=True, capture_output=True, timeout=120)


def main() -> int:
    """Rewrites the pages."""
    parser = argparse.ArgumentParser(description="Put real output into README.md and docs.")
    parser.add_argument("pages", metavar="PAGE", nargs="*", type=Path, default=PAGES, help="all of them by default")
    parser.add_argument("--screenshot", action="store_true", help="also take docs/images/page.png")
    parser.add_argument("--tests", action="store_true", help="also run `make test`")
    parser.add_argument("--results", action="store_true", help="only the rows of the results")
    arguments = parser.parse_args()
    if arguments.results:
        README.write_text(_RESULTS.sub(lambda _: results(), README.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    if arguments.screenshot:
        take_screenshot()
    for page in arguments.pages:
        text = OUTPUT.sub(with_output, page.read_text(encoding="utf-8"))
        page.write_text(_RESULTS.sub(lambda _: results(), text), encoding="utf-8")
    if arguments.tests:
        # Last, because the tests look at the pages too.
        summary = tests()
        README.write_text(_TESTS.sub(lambda _: summary, README.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

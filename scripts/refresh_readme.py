"""Refreshes the generated parts of README.md, docs and examples, so that every output and figure there is real.

    python scripts/refresh_readme.py                run the commands and rewrite their blocks; figures too
    python scripts/refresh_readme.py PAGE...        only those of these pages
    python scripts/refresh_readme.py --results      only figures: docs/results/index.md and README; nothing is run
    python scripts/refresh_readme.py --tests        run `make test` and record its last lines
    python scripts/refresh_readme.py --screenshot   take docs/images/page.png with a browser

- A block below `<!-- output: COMMAND -->` is what COMMAND prints to standard output, without the path of the clone.
  `<!-- output, up to Largest modules: COMMAND -->` ends it before the line that begins with "Largest modules", and
  `<!-- output, from Memory to Notes: COMMAND -->` also leaves out what comes before "Memory"; "..." marks the cuts.
- docs/results/index.md holds the rows "Bars" of every page in docs/results. README has the rows listed in PICKED.
- `make test` takes long, so its last lines are recorded in docs/results/last_test_run.json and shown from there.
"""

import argparse
import datetime
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "results"
INDEX = RESULTS / "index.md"
TEST_RUN = RESULTS / "last_test_run.json"
PAGES = (README, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*/README.md")))
IMAGE = ROOT / "docs" / "images" / "page.png"
WIDTH = "110"
SUBJECT = ("timm:resnet50", "--batch-size", "64", "--device", "t4", "--precision", "amp-fp16")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

PICKED = (
    ("snapshot_steps", "whole steps", "Allocations of whole steps that real GPUs recorded, simulated one by one"),
    ("step_times", "median error, training", "Time of training on an RTX 3090, families not fitted: median error"),
    ("t4_runs", "allocated peak, worst", "Peak of published runs on a Tesla T4: error of the worst"),
    ("xmem_cnn", "reserved peak, median", "Reserved memory of runs on RTX 3060 and 4060: median error"),
    ("xmem_cnn", "reserved peak, worst", "The same: error of the worst"),
    ("timm_rtx3090", "nothing fitted", "timm models on an RTX 3090: batches that trained and failed both predicted"),
    ("plan_gradients", "greatest relative error", "Gradients under exact plans: greatest relative error"),
    ("guard_faults", "weights after", "Training with injected out-of-memory errors: final weights"),
    ("guard_kills", "weights after", "Training killed at random and resumed: final weights"),
    ("stream_speed", "raw preadv, 16 MiB", "A shuffled epoch of a 2 GiB file, of the speed of a sequential read"),
)
"""README's rows of proof: page in docs/results, part of the claim there, and the claim in README's words."""

OUTPUT = re.compile(
    r"(?P<mark><!-- output(?:, from (?P<begin>[^:\n]+?) to (?P<stop>[^:\n]+?)|, up to (?P<end>[^:\n]+))?: "
    r"(?P<command>[^\n]+?) -->)\n```text\n(?P<shown>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
"""A block of output with its mark: (mark, begin and stop or end, command, shown)."""

_SUMMARY = re.compile(r"=+ (.*\bpassed\b.*?) =+|TOTAL +(.*)")


@dataclass(frozen=True, slots=True)
class Row:
    """A claim that a benchmark holds to a limit, as its page in docs/results has it."""

    page: str
    title: str
    claim: str
    measured: str
    limit: str
    met: str


@functools.cache
def run(command: str) -> str:
    """What `command` prints to standard output; `make demo` is run as the script that it is."""
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


def cut(output: str, end: str | None, begin: str | None = None) -> str:
    """The output from the line that begins with `begin` up to the one that begins with `end`."""
    lines = output.splitlines()

    def find(text: str) -> int:
        place = next((number for number, line in enumerate(lines) if line.startswith(text)), None)
        if place is None:
            raise SystemExit(f"no line begins with {text!r}:\n{output}")
        return place

    first = 0 if begin is None else find(begin)
    last = len(lines) if end is None else find(end)
    shown = "\n".join(lines[first:last]).rstrip()
    return ("...\n" if first else "") + shown + ("\n..." if last < len(lines) else "")


def with_output(match: re.Match[str]) -> str:
    """The block of `match` with what its command prints now."""
    shown = cut(run(match["command"]), match["stop"] or match["end"], match["begin"])
    return f"{match['mark']}\n```text\n$ {match['command']}\n{shown}\n```"


def read_rows() -> list[Row]:
    """Every claim of every page in docs/results, with what was measured and the limit it is held to."""
    rows = []
    for path in sorted(RESULTS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        title = text.splitlines()[0].removeprefix("# ")
        bars = text.partition("## Bars\n\n")[2].split("\n\n")[0].splitlines()[2:]
        for line in bars:
            claim, measured, limit, met = (cell.strip() for cell in line.strip(" |").rsplit(" | ", 3))
            rows.append(Row(path.name, title, claim, measured, limit, met))
    return rows


def results_page() -> str:
    """docs/results/index.md: every claim, met or not."""
    rows = read_rows()
    unmet = sum(row.met != "yes" for row in rows)
    lines = [
        "# Results",
        "",
        "Written by `python scripts/refresh_readme.py --results`; don't edit by hand.",
        "",
        f"Each benchmark holds its claims to a limit: {len(rows)} claims, of which {unmet} are not met. The pages have "
        "the date, the commit, the versions and the machine of each measurement. GPU figures are compared with runs "
        "that others measured and published: memfit itself has never run on a physical GPU.",
        "",
        "| benchmark | claim | measured | limit | met |",
        "| --- | --- | ---: | ---: | --- |",
        *(f"| [{row.title}]({row.page}) | {row.claim} | {row.measured} | {row.limit} | {row.met} |" for row in rows),
        "",
    ]
    return "\n".join(lines)


def picked_rows() -> str:
    """README's table of proof."""
    rows = read_rows()
    lines = ["| claim | measured | limit | met |", "| --- | ---: | ---: | --- |"]
    for page, part, words in PICKED:
        row = next((row for row in rows if row.page == f"{page}.md" and part in row.claim), None)
        if row is None:
            raise SystemExit(f"docs/results/{page}.md has no claim with {part!r}")
        lines.append(f"| [{words}](docs/results/{row.page}) | {row.measured} | {row.limit} | {row.met} |")
    return "\n".join(lines)


def test_run() -> str:
    """README's block about the last recorded run of `make test`."""
    record = json.loads(TEST_RUN.read_text(encoding="utf-8"))
    return "\n".join(["```text", f"$ make test    # last run: {record['date']}", "...", *record["lines"], "```"])


def record_test_run() -> None:
    """Runs `make test`, which must pass, and writes its last lines to TEST_RUN."""
    done = subprocess.run(["make", "test"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"make test failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = [" ".join(match[0].strip("= ").split()) for match in _SUMMARY.finditer(done.stdout)]
    record = {"date": datetime.date.today().isoformat(), "lines": lines[-2:]}
    TEST_RUN.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


GENERATED = {"results": picked_rows, "tests": test_run}
"""What stands between `<!-- NAME -->` and `<!-- /NAME -->` in README."""


def with_figures(text: str) -> str:
    """README's text with its generated tables as they are now."""
    for name, render in GENERATED.items():
        block = f"<!-- {name} -->\n{render()}\n<!-- /{name} -->"
        text = re.sub(rf"<!-- {name} -->\n.*?<!-- /{name} -->", lambda _, block=block: block, text, flags=re.DOTALL)
    return text


def take_screenshot() -> None:
    """Writes docs/images/page.png: the top of a real page in a real browser."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(f"no browser: none of {', '.join(BROWSERS)} is on PATH")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        run(shlex.join(["memfit", "estimate", *SUBJECT, "--html", str(page)]))
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,890"]
        flags += ["--disable-background-networking", f"--user-data-dir={folder}/profile", f"--screenshot={IMAGE}"]
        subprocess.run([browser, *flags, page.as_uri()], check=True, capture_output=True, timeout=120)


def main() -> int:
    """Rewrites the pages."""
    parser = argparse.ArgumentParser(description="Refresh the generated parts of README.md, docs and examples.")
    parser.add_argument("pages", metavar="PAGE", nargs="*", type=Path, default=PAGES, help="all of them by default")
    parser.add_argument("--screenshot", action="store_true", help="only take docs/images/page.png")
    parser.add_argument("--tests", action="store_true", help="only run `make test` and record its last lines")
    parser.add_argument("--results", action="store_true", help="only the figures of docs/results/index.md and README")
    arguments = parser.parse_args()
    if arguments.screenshot:
        take_screenshot()
    elif arguments.tests:
        record_test_run()
    elif not arguments.results:
        for page in arguments.pages:
            page.write_text(OUTPUT.sub(with_output, page.read_text(encoding="utf-8")), encoding="utf-8")
    INDEX.write_text(results_page(), encoding="utf-8")
    README.write_text(with_figures(README.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

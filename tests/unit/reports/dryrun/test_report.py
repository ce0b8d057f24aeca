import io
from pathlib import Path

import pytest
from rich.console import Console

from memfit.core.dryrun import Outcome
from memfit.core.estimate import Note
from memfit.reports.dryrun import figures as run_figures
from memfit.reports.parts import RULE
from memfit.reports.terminal import render_report
from tests.unit.reports.run_builders import ADVICE, make_dead_run, make_failure, make_run, make_run_estimate, make_scan

GOLDEN = Path(__file__).parents[1] / "golden"

RUNS = {
    "run": make_run(redirected={"runs/last.pt": "tmp/runs/last.pt"}),
    "run_dead": make_dead_run(),
    "run_scan": make_run(scan=make_scan(), advice=ADVICE),
}


def text_of(run):
    return str(run_figures.report(run))


@pytest.mark.parametrize("name", RUNS)
def test_text_is_as_agreed(name):
    """The whole text; to change it, write `str(report(RUNS[name]))` to the golden file and read the change."""
    assert text_of(RUNS[name]) + "\n" == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_text_is_ascii_and_begins_with_a_rule(run):
    text = text_of(run)

    assert text.isascii()
    assert text.startswith(f"{RULE}\n")
    assert not text.endswith("\n")


def test_names_cannot_steer_the_terminal():
    # GIVEN escape sequences wherever a script can put text
    bad = "\x1b[31mred\n"
    failure = make_failure(source=bad, code=bad, module=bad, op=bad, by_category={bad: 1})
    run = make_dead_run(
        script=bad,
        arguments=(bad,),
        failures=(failure, make_failure(handled=True, source=bad)),
        error=bad,
        redirected={bad: bad},
        scan=make_scan(problem=bad, failure=failure),
        estimate=make_run_estimate(notes=(Note(bad, bad, bad), Note("stand-in-value", bad, bad))),
    )

    # THEN only the text's own line ends are left
    for outcome in Outcome:
        text = text_of(_with(run, outcome))
        assert "\x1b" not in text
        assert all(line.isprintable() for line in text.split("\n"))


def _with(run, outcome):
    import dataclasses

    return dataclasses.replace(run, outcome=outcome)


def test_a_crash_is_a_verdict_and_nothing_else():
    run = make_run(estimate=None, outcome=Outcome.CRASHED, error="the process was ended by SIGSEGV", num_steps=0)

    assert text_of(run) == f"{RULE}\ntrain.py crashed: the process was ended by SIGSEGV"


def test_print_shows_the_text():
    import memfit

    assert memfit.DryRun is type(make_run())
    assert str(make_run()) == text_of(make_run())


def shown(run, width=200, **options):
    file = io.StringIO()
    Console(file=file, width=width, **options).print(render_report(run_figures.report(run)))
    return file.getvalue()


@pytest.mark.parametrize("run", [make_run(), make_dead_run(), make_run(scan=make_scan())])
def test_the_terminal_says_what_the_figures_say(run):
    text = shown(run)

    for line in (run_figures.verdict(run), *run_figures.details(run)):
        assert line in text
    for part in run_figures.parts(run):
        assert part.title in text
        assert all(line in text for line in part.lines)
        assert all(row.name in text for row in part.rows)


def test_a_rule_separates_it_from_the_output_of_the_script():
    assert set(shown(make_run()).splitlines()[0]) == {"\u2500"}


def test_what_wraps_stays_below_its_beginning():
    lines = shown(make_dead_run(), width=60).splitlines()

    start = next(i for i, line in enumerate(lines) if "asked for" in line)
    assert lines[start].startswith("  aten.convolution")
    assert lines[start + 1].startswith("  ")
    assert not any(line.endswith(" ") for line in lines[start : start + 1])


@pytest.mark.parametrize(
    ("run", "colour"), [(make_run(), "32"), (make_dead_run(), "31"), (make_run(outcome=Outcome.NO_STEP), "33")]
)
def test_the_verdict_has_the_colour_of_the_answer(run, colour):
    text = shown(run, color_system="standard", force_terminal=True)

    assert f"\x1b[1;{colour}mtrain.py" in text


def test_names_are_no_markup():
    run = make_dead_run(script="[red]train.py", failures=(make_failure(code="[bold]x[/bold]"),))

    text = shown(run)
    assert "[red]train.py would run out" in text
    assert "[bold]x[/bold]" in text

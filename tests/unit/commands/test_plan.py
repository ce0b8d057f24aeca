import json

import pytest

import memfit
from memfit.commands import build_parser, main, output
from memfit.commands import plan as command
from memfit.commands.parser import UsageError
from memfit.core.errors import StepFailed
from memfit.core.plan import Plan, PlanNotFound
from memfit.reports.plan.code import format_code
from tests import jobs
from tests.unit.reports.plan_builders import make_plan, make_small_plan

MESSAGE = "no plan fits `step` into 512.0 MiB; the smallest needs 900.0 MiB."


class Planner:
    """Takes the place of the search: remembers what it was asked and gives, or raises, what it was told."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = []

    def __call__(self, *arguments, **options):
        self.asked.append((arguments, options))
        print("the user's own code prints")
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def planner(monkeypatch):
    stub = Planner(make_plan())
    monkeypatch.setattr(command.memfit, "plan", stub)
    return stub


@pytest.fixture
def script_planner(monkeypatch, tmp_path):
    stub = Planner(make_plan(subject="train.py"))
    monkeypatch.setattr(command.memfit, "plan_script", stub)
    monkeypatch.chdir(tmp_path)
    return stub


def run(capsys, *arguments):
    code = main(["plan", *arguments])
    return code, capsys.readouterr()


def test_the_plan_is_printed(script, planner, capsys):
    code, written = run(capsys, f"{script}:job", "-d", "rtx-3090")

    assert code == 0
    assert written.out.startswith("ResNet on NVIDIA GeForce RTX 3090: 1.13 GiB -> 900.0 MiB (simulated)")
    assert "recompute 3 of 16 blocks" in written.out
    assert written.err == "the user's own code prints\n"


def test_what_is_asked_for_reaches_the_planner(script, planner, capsys):
    line = "-d t4 --budget 10GiB -b 64 -p auto --allow exact,lora --count 4 --no-measure --seconds 7.5"
    run(capsys, f"{script}:job", *line.split())
    run(capsys, f"{script}:job", "-d", "t4", "--effective-batch", "6", "-p", "amp-bf16", "-o", "sgd")

    ((job,), first), ((other,), second) = planner.asked
    assert isinstance(job, memfit.Job)
    assert job.precision is None
    assert first == {
        "device": "t4",
        "budget": "10GiB",
        "precision": "auto",
        "allow": ["exact", "lora"],
        "count": 4,
        "options": memfit.PlanOptions(effective_batch=64, measure=False, seconds=7.5),
    }
    assert second["options"] == memfit.PlanOptions(effective_batch=6)
    assert second["precision"] == "amp-bf16"
    assert second["allow"] == ["exact", "rounding"]
    assert other.precision == "amp-bf16"


def test_json_is_the_plan_and_nothing_else(script, planner, capsys):
    code, written = run(capsys, f"{script}:job", "-d", "t4", "--json")

    assert code == 0
    assert Plan.from_json(written.out) == make_plan()


def test_the_code_is_printed_alone(script, planner, capsys):
    _, written = run(capsys, f"{script}:job", "-d", "t4", "--code")

    assert written.out == format_code(make_plan())


def test_plan_and_page_are_written(script, planner, capsys, tmp_path):
    code, written = run(capsys, f"{script}:job", "-d", "t4", "--save", "plan.json", "--html", "plan.html")

    assert code == 0
    assert written.out.endswith("plan written to plan.json\n\npage written to plan.html\n")
    assert Plan.load(tmp_path / "plan.json") == make_plan()
    assert "<html" in (tmp_path / "plan.html").read_text(encoding="utf-8")


def test_files_beside_json_leave_json_alone(script, planner, capsys, tmp_path):
    _, written = run(capsys, f"{script}:job", "-d", "t4", "--json", "--save", "plan.json", "--html", "plan.html")

    json.loads(written.out)
    assert {"plan.json", "plan.html"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "there is nothing to plan: give a TARGET such as timm:resnet50, or --script and a script."),
        (["a.py:b", "c.py:d"], "one TARGET is planned at a time, but 'c.py:d' was given as well."),
        (["{}:job", "--count", "0"], "--count must be at least 1, but 0 was given."),
        (["{}:job", "--html", "missing/x.html"], "there is no folder 'missing' to write 'missing/x.html' to."),
        (["{}:job", "--save", "missing/x.json"], "there is no folder 'missing' to write 'missing/x.json' to."),
        (["{}:job", "-b", "0"], "--batch-size must be at least 1, but 0 was given."),
        (["--script"], "--script takes the path of a script, such as --script train.py, but none was given."),
        (["-b", "4", "--script", "train.py"], "--batch-size is for a TARGET; a script has its own. Pass it to the"),
        (
            ["a.py:b", "-d", "t4", "--script", "c.py"],
            "either a TARGET or a script is planned, but 'a.py:b' and --script",
        ),
        (["-d", "t4", "a.py:b", "--script", "c.py", "-x"], "either a TARGET or a script is planned, but 'a.py:b' and"),
        (
            ["--script", "train.py", "-d", "t4"],
            "--device came after the script, so it was passed to the script. Write it",
        ),
    ],
)
def test_bad_input_is_one_message_and_no_work(script, planner, script_planner, capsys, options, message):
    code, written = run(capsys, *(option.format(script) for option in options))

    assert code == 2
    assert written.out == ""
    assert written.err.startswith(f"memfit: {message}")
    assert written.err.count("\n") == 1
    assert planner.asked == script_planner.asked == []


def test_unknown_names_are_refused_by_the_parser(script, capsys):
    with pytest.raises(SystemExit) as caught:
        run(capsys, f"{script}:job", "--precision", "int8")

    assert caught.value.code == 2
    assert "there is no 'int8'. Choose from keep, auto, fp32" in capsys.readouterr().err


def test_where_nothing_fits_the_message_says_so(script, planner, capsys):
    planner.answer = PlanNotFound(MESSAGE, make_small_plan(), "rtx-3090")
    code, written = run(capsys, f"{script}:job", "-d", "512MiB")

    assert code == 3
    assert written.out == ""
    assert written.err.endswith(f"memfit: {MESSAGE}\n")


def test_where_nothing_fits_json_is_the_smallest_plan(script, planner, capsys):
    planner.answer = PlanNotFound(MESSAGE, make_small_plan(), "rtx-3090")
    code, written = run(capsys, f"{script}:job", "-d", "512MiB", "--json")

    found = json.loads(written.out)
    assert code == 3
    assert (found["fits"], found["message"], found["device_that_would_do"]) == (False, MESSAGE, "rtx-3090")
    assert Plan.from_json(found) == make_small_plan()


def test_where_not_even_the_smallest_is_known_json_says_so(script, planner, capsys):
    planner.answer = PlanNotFound(MESSAGE)
    code, written = run(capsys, f"{script}:job", "-d", "512MiB", "--json", "--html", "x.html")

    assert code == 3
    error = {"type": "PlanNotFound", "message": MESSAGE, "exit_code": 3}
    found = {"fits": False, "message": MESSAGE, "device_that_would_do": None, "error": error}
    assert json.loads(written.out) == found
    assert "memfit: nothing is written to x.html (--html), because no plan fits\n" in written.err


def test_where_nothing_fits_the_page_shows_what_is_left(script, planner, capsys, tmp_path):
    planner.answer = PlanNotFound(MESSAGE, make_small_plan())
    _, written = run(capsys, f"{script}:job", "-d", "512MiB", "--html", "x.html", "--save", "plan.json")

    assert written.out == "page of the smallest plan written to x.html\n"
    assert "memfit: nothing is written to plan.json (--save), because no plan fits\n" in written.err
    assert "does not fit" in (tmp_path / "x.html").read_text(encoding="utf-8")
    # Nobody should apply a plan that doesn't fit by mistake.
    assert not (tmp_path / "plan.json").exists()


def test_an_interruption_leaves_nothing(script, planner, capsys, tmp_path):
    planner.answer = KeyboardInterrupt()
    before = sorted(tmp_path.iterdir())
    code, written = run(capsys, f"{script}:job", "-d", "t4", "--html", "x.html", "--save", "plan.json")

    assert code == 130
    assert written.err.endswith("memfit: interrupted\n")
    assert [path for path in sorted(tmp_path.iterdir()) if path.suffix != ".pyc" and path.name != "__pycache__"] == [
        path for path in before if path.name != "__pycache__"
    ]


@pytest.mark.parametrize(
    ("line", "given"),
    [
        ("-d t4 --script train.py", []),
        ("-d t4 --json --script train.py --json -d cuda", ["--json", "-d", "cuda"]),
        ("-d t4 --script train.py --lr 1 -- -b 3 x", ["--lr", "1", "--", "-b", "3", "x"]),
        ("-d t4 --script train.py -- x", ["--", "x"]),
        ("-d t4 --script train.py -h --version --all", ["-h", "--version", "--all"]),
    ],
)
def test_what_follows_the_script_is_its_own(script_planner, capsys, line, given):
    code, _ = run(capsys, *line.split())

    (arguments, options) = script_planner.asked[0]
    assert code == 0
    assert arguments == ("train.py", given)
    assert (options["device"], options["options"].quiet_output, options["precision"]) == ("t4", True, "keep")


def test_the_plan_of_a_script_is_printed(script_planner, capsys):
    _, written = run(capsys, "-d", "t4", "--budget", "10GiB", "--script", "train.py")

    assert "train.py on NVIDIA GeForce RTX 3090" in written.out
    assert script_planner.asked[0][1]["budget"] == "10GiB"


def test_a_script_that_fails_has_the_exit_codes_of_a_dry_run(script_planner, capsys):
    script_planner.answer = StepFailed("the script failed")
    script_planner.answer.exit_code = 4

    assert run(capsys, "-d", "t4", "--script", "train.py")[0] == 4


def test_options_are_never_short_forms(script, planner):
    parser = build_parser()
    with pytest.raises(UsageError, match="--bud"):
        parser.parse_args(["plan", f"{script}:job", "--bud", "10GiB"])


def test_json_and_code_are_one_too_many(script, planner, capsys):
    code, written = run(capsys, f"{script}:job", "--json", "--code")

    message = "--json and --code both write to standard output. Give one of them."
    assert (code, json.loads(written.out)["error"]["message"]) == (2, message)
    assert planner.asked == []


def test_several_devices_give_a_table_and_a_list(script, planner, capsys):
    code, written = run(capsys, f"{script}:job", "-d", "t4,a10g")

    assert code == 0
    assert [options["device"].name for _, options in planner.asked] == ["t4", "a10g"]
    for cell in ("NVIDIA Tesla T4", "NVIDIA A10G", "900.0 MiB", "1.19x", "4 micro-batches of 8 samples"):
        assert cell in written.out
    planner.answer = PlanNotFound(MESSAGE, make_small_plan())
    code, written = run(capsys, f"{script}:job", "-d", "t4", "-d", "a10g", "--json")
    assert (code, [found["message"] for found in json.loads(written.out)]) == (3, [MESSAGE, MESSAGE])


@pytest.mark.parametrize("option", [["--html", "x.html"], ["--save", "x.json"], ["--code"], ["--script", "x.py"]])
def test_what_is_for_one_device_is_refused_for_several(script, planner, capsys, option):
    given = option if option[0] == "--script" else [f"{script}:job", *option]
    code, written = run(capsys, "-d", "t4,a10g", *given)

    assert code == 2
    assert written.err == f"memfit: {option[0]} is for one device, but t4, a10g were given. Name one at a time.\n"
    assert planner.asked == []


def test_progress_is_told(script, planner, capsys, monkeypatch):
    told = []
    progress = output.progress
    monkeypatch.setattr(
        output, "progress", lambda text, **options: told.append((text, options)) or progress(text, **options)
    )
    run(capsys, f"{script}:job", "-d", "t4")
    run(capsys, f"{script}:job", "-d", "t4", "--json")

    assert told == [(f"planning {script}:job", {"quiet": quiet}) for quiet in (False, True)]


def test_json_equals_what_the_api_says(script, capsys):
    """The real search, on a budget that the plain step exceeds."""
    whole = memfit.estimate(jobs.conv_job(), device="cpu").peak_bytes
    budget = str(whole * 9 // 10)
    code, written = run(
        capsys,
        f"{script}:job",
        "-d",
        "cpu",
        "--budget",
        budget,
        "--allow",
        "exact,rounding,approximate",
        "--no-measure",
        "--json",
    )

    found = Plan.from_json(written.out)
    allow = ("exact", "rounding", "approximate")
    expected = memfit.plan(
        jobs.conv_job(), device="cpu", budget=budget, allow=allow, options=memfit.PlanOptions(measure=False)
    )
    assert code == 0
    assert found.fits
    assert found.moves
    assert (found.settings, found.before, found.after) == (expected.settings, expected.before, expected.after)

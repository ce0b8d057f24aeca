"""The documentation tells the truth: its files exist, its links lead somewhere, its code runs, its pages are fresh."""

import doctest
import importlib.util
import inspect
import re
import shlex
import sys
from pathlib import Path

import pytest

import memfit
from memfit.commands import build_parser
from memfit.core.units import format_size
from memfit.planner import moves

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(
    r"(?<![\w/.-])((?:src|docs|examples|tests|scripts|benchmarks)/[\w./-]*\w|[A-Z]+\.md|constraints\.txt)"
)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def slugs(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def find_dead_links(page: Path) -> list[str]:
    dead = []
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in slugs(file)):
            dead.append(target)
    return dead


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    assert find_dead_links(page) == []


def test_dead_links_are_caught(tmp_path):
    (tmp_path / "there.md").write_text("# A heading\n")
    page = tmp_path / "page.md"
    page.write_text("[a](there.md#a-heading) [b](gone.md) [c](there.md#gone) [d](https://example.com)\n")

    assert find_dead_links(page) == ["gone.md", "there.md#gone"]


def test_files_named_in_the_readme_exist():
    missing = [name for name in FILE.findall(README.read_text(encoding="utf-8")) if not (ROOT / name).exists()]

    assert missing == []


def test_make_targets_named_in_the_docs_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make (\w+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{named(page)}: make {target}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_in_the_docs_can_be_parsed(page):
    blocks = "\n".join(body for _, body in FENCE.findall(page.read_text(encoding="utf-8")))
    # What memfit says begins with its name, too, and has a colon there.
    commands = re.findall(r"^(?:\$ )? *memfit (\w+(?:-\w+)*(?: .*)?)$", blocks, re.MULTILINE)
    for command in commands:
        arguments = shlex.split(re.split(r" >>? | && | \| ", command)[0], comments=True)
        assert build_parser().parse_args(arguments).command == arguments[0]


def test_every_public_name_is_documented():
    docs = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    words = set(re.findall(r"\w+", docs))

    assert [name for name in memfit.__all__ if name not in words] == []
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert [name for name in memfit.__all__ if f"`{name}`" not in index] == []


def test_every_note_code_is_documented():
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    codes = set(re.findall(r'\bNote\(\s*"([a-z-]+)"', sources))
    codes |= set(re.findall(r'^[A-Z_]+ = "([a-z]+(?:-[a-z]+)+)"$', sources, re.MULTILINE))
    codes -= {*moves.KEEPS, moves.APPROXIMATE}
    page = (ROOT / "docs" / "reference" / "notes.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE))

    assert {"data-dependent-shape", "cache-released"} <= codes, "the search for codes is wrong"
    assert codes - documented == set()
    assert [code for code in documented if f'"{code}"' not in sources] == [], "nothing makes such a note"


def test_every_move_is_documented():
    text = (ROOT / "docs" / "howto" / "plan.md").read_text(encoding="utf-8")
    table = text.partition("\n## Moves\n")[2].partition("\n## ")[0]
    found = {
        name: keeps.strip() for name, keeps in re.findall(r"^\| `([a-z0-9-]+)` .*\|([^|]+)\|$", table, re.MULTILINE)
    }

    assert found == {name: keeps.value for name, keeps in moves.KEEPS.items()}


def test_limits_named_in_the_docs_are_those_of_the_code():
    pytest.importorskip("torch")
    from memfit.frameworks.torch.kernels import assumed_values
    from memfit.frameworks.torch.shapes import stand_in, values

    text = " ".join((ROOT / "docs" / "howto" / "dryrun.md").read_text(encoding="utf-8").split())
    limits = [getattr(values.KnownValues, f"limit_bytes_{name}") for name in ("integer", "float", "total")]
    integers, numbers, total = (format_size(limit).replace(".0", "") for limit in limits)

    assert f"up to {integers} of integers or booleans and up to {numbers} of other numbers" in text
    assert f"in a tensor, and {total} in all" in text
    assert f"A model is held to {format_size(stand_in._BUDGET_BYTES).replace('.0', '')} there" in text
    assert f"read {assumed_values._PATIENCE:,} times at one line" in text


def test_the_snippet_of_the_tutorial_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    page = ROOT / "docs" / "tutorials" / "before_renting.md"
    blocks = [body for kind, body in FENCE.findall(page.read_text(encoding="utf-8")) if kind == "diff"]
    snippet = next(body for body in blocks if "memfit.estimate(" in body)
    code = "\n".join(line[1:] for line in snippet.splitlines())
    monkeypatch.chdir(tmp_path)

    exec(compile(code, page.name, "exec"), {"__name__": "tutorial"})

    assert "usable on NVIDIA GeForce RTX 3060: fits" in capsys.readouterr().out
    assert (tmp_path / "memory.html").is_file()


@pytest.mark.parametrize("page", [p for p in PAGES if ">>> " in p.read_text(encoding="utf-8")], ids=named)
def test_sessions_in_the_docs_are_real(page):
    pytest.importorskip("torch")
    result = doctest.testfile(str(page), module_relative=False)

    assert result.attempted
    assert result.failed == 0


def test_the_page_of_the_command_line_is_up_to_date():
    script = load_script("generate_cli_docs")

    assert script.PAGE.read_text(encoding="utf-8") == script.render(), "run `python scripts/generate_cli_docs.py`"


def outputs(page: Path) -> list[re.Match[str]]:
    """The blocks of output that `scripts/refresh_readme.py` writes."""
    return list(load_script("refresh_readme").OUTPUT.finditer(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", [p for p in PAGES if "<!-- " in p.read_text(encoding="utf-8")], ids=named)
def test_every_output_shown_has_its_command(page):
    text = page.read_text(encoding="utf-8")
    found = outputs(page)

    assert "<!-- sample" not in text
    assert len(found) == text.count("<!-- output")
    assert not found or page in load_script("refresh_readme").PAGES, "nothing writes these blocks"
    for block in found:
        assert block["shown"].startswith(f"$ {block['command']}\n")
        assert block["shown"].count("\n") > 3, "the output is missing: run `python scripts/refresh_readme.py`"
        assert block["shown"].endswith("\n...\n") == (block["end"] is not None or block["stop"] is not None)


def test_what_a_command_prints_is_the_same_on_every_page():
    shown = {}
    for page in load_script("refresh_readme").PAGES:
        for block in outputs(page):
            lines = block["shown"].partition("\n")[2].removeprefix("...\n").removesuffix("...\n")
            shown.setdefault(block["command"], []).append(lines.rstrip())

    assert any(len(versions) > 1 for versions in shown.values()), "no command is shown twice"
    for command, versions in shown.items():
        whole = max(versions, key=len)
        # Some begin later, and others end earlier.
        assert [v for v in versions if v not in whole and not joined(v, whole)] == [], f"run the script for {command}"


def joined(one: str, other: str) -> bool:
    """Whether two parts of a text overlap: the end of one is the beginning of the other."""
    lines, others = one.splitlines(), other.splitlines()
    return any(
        lines[-count:] == others[:count] or others[-count:] == lines[:count]
        for count in range(3, min(len(lines), len(others)) + 1)
    )


def test_output_is_cut_where_its_mark_says():
    cut = load_script("refresh_readme").cut

    assert cut("a\n\nb 1\nc", "b") == "a\n..."
    assert cut("a\nb", None) == "a\nb"
    assert cut("a\nb\n\nc\nd", "d", "b") == "...\nb\n\nc\n..."
    with pytest.raises(SystemExit, match="no line begins with 'z'"):
        cut("a\nb", "z")


def test_no_page_knows_where_it_was_written():
    assert [named(page) for page in PAGES if str(ROOT) in page.read_text(encoding="utf-8")] == []


def snippet(page: Path, part: str) -> str:
    blocks = (body for kind, body in FENCE.findall(page.read_text(encoding="utf-8")) if kind == "python")
    return next(body for body in blocks if part in body)


def test_the_snippet_of_simulate_runs(tmp_path, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    page = ROOT / "docs" / "howto" / "dryrun.md"
    code = snippet(page, "memfit.simulate(")
    monkeypatch.chdir(tmp_path)
    names = {
        "memfit": memfit,
        "torch": torch,
        "MyModel": lambda: torch.nn.Linear(1024, 1024),
        "train_one_epoch": lambda model: model(torch.ones(8, 1024, device="cuda")).sum().backward(),
    }

    exec(compile(code, page.name, "exec"), names)

    first = int(capsys.readouterr().out.splitlines()[0])
    # Weights, their gradients and two workspaces of cuBLAS.
    assert first >= 2 * 4 * 1024 * 1025 + 2 * 32 * 2**20
    assert not torch.cuda.is_available()
    assert names["model"].weight.device.type == "cpu"


def test_the_snippet_of_dryrun_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    script = [
        "import sys, torch",
        "model = torch.nn.Linear(256, 256).cuda()",
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        "while True:",
        "    model(torch.ones(int(sys.argv[2]), 256).cuda()).sum().backward()",
        "    optimizer.step()",
    ]
    (tmp_path / "train.py").write_text("\n".join(script))
    monkeypatch.chdir(tmp_path)

    exec(compile(snippet(ROOT / "docs" / "howto" / "dryrun.md", "memfit.dryrun("), "dryrun.md", "exec"), {})

    shown = capsys.readouterr().out
    assert "train.py on NVIDIA Tesla T4: ran 3 steps" in shown
    assert "\nTrue completed\n" in shown
    assert "'train.py:5': " in shown
    assert (tmp_path / "memory.html").is_file()


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "howto" / "plan.md"], ids=named)
def test_the_snippet_of_plan_runs(page, capsys):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    before = model[0].weight.clone()
    batch = torch.randn(8, 64)
    names = {
        "memfit": memfit,
        "model": model,
        "loss": lambda model, batch: model(batch).square().mean(),
        "batch": batch,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "loader": [batch, batch],
    }

    exec(compile(snippet(page, "memfit.plan("), page.name, "exec"), names)

    if page != README:
        assert "Sequential on NVIDIA GeForce RTX 3090: " in capsys.readouterr().out
    assert not torch.equal(model[0].weight, before)


GUARDED = [p for p in PAGES if re.search(r"^\+guard = memfit.Guard\(", p.read_text(encoding="utf-8"), re.MULTILINE)]


@pytest.mark.parametrize("page", GUARDED, ids=named)
def test_both_sides_of_the_difference_that_a_guard_makes_run_and_agree(page, tmp_path, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    blocks = [body for kind, body in FENCE.findall(page.read_text(encoding="utf-8")) if kind == "diff"]
    lines = next(body for body in blocks if "memfit.Guard(" in body).splitlines()
    losses = []
    for left_out in "+-":
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        names = {
            "torch": torch,
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
            "loader": [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(3)],
        }

        code = "\n".join(line[1:] for line in lines if not line.startswith(left_out))
        exec(compile(code, page.name, "exec"), names)
        if "guard" in names:
            names["guard"].close()

        losses.append([float(value) for value in capsys.readouterr().out.split()])

    assert len(losses[0]) == 3
    assert losses[0] == losses[1]


def undocumented(subject) -> list[str]:
    """Parameters of a public function or class that its docstring, which is the reference, doesn't describe."""
    text = inspect.getdoc(subject) or ""
    described = set(re.findall(r"^ +\*{0,2}(\w+)(?:, \*{0,2}(\w+))?(?: \([^)]*\))?:", text, re.MULTILINE))
    names = {name for pair in described for name in pair}
    return [name for name in inspect.signature(subject).parameters if name not in names and name[0] != "_"]


def test_every_parameter_of_a_public_name_is_in_its_docstring():
    # What only memfit makes, such as an Estimate, is described by its attributes.
    made_by_users = ("Guard", "Job", "AllocatorOptions")
    names = [n for n in memfit.__all__ if n[0].islower() or n in made_by_users or n.endswith("Options")]
    subjects = {name: getattr(memfit, name) for name in names if callable(getattr(memfit, name))}
    # A single parameter is described by the sentence itself.
    checked = {name: subject for name, subject in subjects.items() if len(inspect.signature(subject).parameters) > 1}

    assert len(checked) > 12
    missing = {name: left for name, subject in checked.items() if (left := undocumented(subject))}
    assert missing == {}


def test_a_parameter_without_a_description_is_caught():
    def function(one, two, *rest, **others):
        """Does something.

        Args:
            one: described.
            *rest: described.
        """

    assert undocumented(function) == ["two", "others"]


def test_figures_are_those_of_the_last_measurements():
    script = load_script("refresh_readme")
    text = README.read_text(encoding="utf-8")

    assert script.INDEX.read_text(encoding="utf-8") == script.results_page(), "run `refresh_readme.py --results`"
    assert text == script.with_figures(text), "run `python scripts/refresh_readme.py --results`"
    assert len(script.PICKED) == 10
    assert all(f"<!-- {name} -->" in text for name in script.GENERATED)


def test_the_readme_is_short():
    assert len(README.read_bytes()) <= 12_000


def test_the_readme_says_when_the_tests_were_run_last():
    assert re.search(r"^\$ make test +# last run: \d{4}-\d\d-\d\d$", README.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_number_of_devices_in_the_readme_is_right():
    count = sum(device.kind == "cuda" for device in memfit.list_devices())

    assert f"{count} CUDA devices" in README.read_text(encoding="utf-8")


def test_the_picture_is_small():
    picture = ROOT / "docs" / "images" / "page.png"

    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 300_000

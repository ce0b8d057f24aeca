from dataclasses import replace

import pytest

from memfit.reports.diff import figures
from memfit.reports.page import render_page
from memfit.snapshots.difference import DifferenceKind, Group, Levels, SnapshotDifference

MISSING = Group(
    DifferenceKind.MISSING,
    "aten.sum",
    "net.py:3",
    "",
    "at::native::gpu_reduce_kernel",
    5,
    5000,
    ((1000, 4), (1000, 1)),
    1000,
)


@pytest.fixture
def result():
    real = Levels(1000, 0, 2**30, 2**30, 2**30)
    simulated = Levels(997, 0, 2**30 - 2**20, 2**30, 2**29)
    invented = Group(DifferenceKind.INVENTED, "aten.clone", "", "net.0", "", 2, 64, ((32, 2),), -64)
    groups = (MISSING, invented)
    return SnapshotDifference("s.pickle", "train.py", "a GPU", real, simulated, 995, 0, groups, True, 1000, 0, 2, False)


def test_the_text_has_all_that_differs(result):
    text = str(figures.report(result))

    assert text.startswith("s.pickle: 995 of 1,000 allocations (99.50%) are simulated")
    assert "5 missing, 2 invented, 0 in another order" in text
    assert "compared with set-up to step 2 of train.py on a GPU" in text
    assert "-0.098%" in text
    assert "exact" in text
    assert "net.py:3" in text
    assert "4 x 1,000, 1 x 1,000" in text
    assert "-64 B" in text
    assert "memfit diff --json" in text


def test_what_a_history_lacks_is_said(result):
    lines = figures.details(
        replace(result, num_operators=0, ends_early=True, is_whole=False, first_step=0, last_step=0)
    )

    assert any("stacks='all'" in line for line in lines)
    assert any("--steps" in line for line in lines)
    assert any("begun later" in line and "with set-up of" in line for line in lines)


@pytest.mark.parametrize(
    ("stack", "releases", "is_told"),
    [
        ("torch2.13.0-cu130", ("2.1",), True),
        ("torch2.13.0-cu130", ("2.12", "2.13"), False),
        ("torch2.6-cu124", ("2.6",), False),
        ("torch2.6-cu124", (), False),
        ("", ("2.6",), False),
    ],
)
def test_a_snapshot_of_another_release_is_told(result, stack, releases, is_told):
    lines = figures.details(replace(result, versions={"stack": stack}, releases=releases))

    assert any("made with PyTorch 2.1 by" in line and "--stack torch2.1" in line for line in lines) == is_told


def test_the_same_is_good_news(result):
    same = replace(result, simulated=result.real, num_aligned=1000, groups=())

    assert figures.report(same).is_good
    assert figures.answer(same) == "event for event"
    assert "To report this" not in str(figures.report(same))


def test_many_groups_are_cut(result):
    text = str(figures.report(replace(result, groups=tuple(replace(MISSING, source=f"net.py:{n}") for n in range(20)))))

    assert "and 8 more" in text


def test_the_page_has_every_group(result):
    page = render_page(result)

    assert "memfit diff: s.pickle" in page
    assert "net.py:3" in page
    assert figures.build_diff_payload(result)["kinds"][0][0].startswith("Missing")

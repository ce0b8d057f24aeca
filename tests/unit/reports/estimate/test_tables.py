import dataclasses

import pytest

from memfit.core.estimate import Note
from memfit.core.plan import PlanNotFound
from memfit.core.units import GIB
from memfit.reports.estimate import figures, tables
from memfit.reports.parts import HARMLESS
from tests.unit.reports.builders import MYSTERY, RTX_3090, make_estimate, make_failed_estimate
from tests.unit.reports.plan_builders import make_plan, make_small_plan


def cells(table):
    return [line.cells for line in table.parts[0].grid.lines]


def test_estimates_have_a_line_each_with_origins():
    table = tables.estimates([make_estimate(), make_estimate(device=MYSTERY)])

    assert table.verdict == "ResNet: training, batch size 32, precision float32"
    assert table.is_good
    assert cells(table)[0] == (
        "NVIDIA GeForce RTX 3090",
        "1.13 GiB",
        "23.7 GiB (measured)",
        "5%",
        "yes, 99%",
        "unknown",
    )
    assert cells(table)[1][2:] == ("unknown",) * 4


def test_batches_say_where_none_fits():
    table = tables.batches("ResNet", [(64, 68, make_estimate()), (None, None, make_failed_estimate())])

    assert table.verdict == "ResNet: largest batch size"
    assert not table.is_good
    assert [line[1:3] for line in cells(table)] == [("64", "68"), ("none", "none")]


def test_plans_name_their_moves_and_what_is_missing():
    small = dataclasses.replace(make_small_plan())
    lost = PlanNotFound("no plan fits.\nmore", None)
    table = tables.plans([(RTX_3090, make_plan()), (RTX_3090, PlanNotFound("no plan", small)), (MYSTERY, lost)])

    good, bad, unknown = cells(table)
    assert table.verdict == "ResNet: plans"
    assert good[1:4] == ("900.0 MiB", "900.0 MiB", "yes")
    assert good[5] == "1.19x"
    assert good[-1].startswith("4 micro-batches of 8 samples")
    assert (bad[3], bad[-1][:43]) == ("no", "nothing that is allowed fits; the smallest:")
    assert unknown[1:] == ("unknown", "unknown", "no", "unknown", "unknown", "no plan fits.")


LACKS = Note("device-lacks-precision", "bf16 is slow here")
EVERYWHERE = Note("data-dependent-shape", "upper bound used", "train.py:8")
READ = Note(HARMLESS, "a value")


def test_notes_say_on_which_device_they_hold():
    plain = dataclasses.replace(make_estimate(), notes=(EVERYWHERE,))
    old = dataclasses.replace(make_estimate(device=MYSTERY), notes=(EVERYWHERE, LACKS, LACKS))
    lines = (
        "data-dependent shape at train.py:8: upper bound used",
        "Mystery: device lacks precision: bf16 is slow here",
    )

    for table in (
        tables.estimates([plain, old]),
        tables.batches("ResNet", [(8, 9, plain), (8, 9, old)]),
        tables.plans(
            [
                (RTX_3090, dataclasses.replace(make_plan(), notes=plain.notes)),
                (MYSTERY, PlanNotFound("no plan", dataclasses.replace(make_plan(), notes=old.notes))),
            ]
        ),
    ):
        assert [part.title for part in table.parts] == ["Devices", "Notes"]
        assert table.parts[1].lines == tuple(line.replace("Mystery", figures.device_title(MYSTERY)) for line in lines)


def test_values_that_were_read_are_summed_up():
    table = tables.estimates([dataclasses.replace(make_estimate(), notes=(READ, READ))])

    assert [line.split(" read")[0] for line in table.parts[1].lines] == ["2 values were"]


def test_the_sizes_are_in_order_and_the_chosen_one_is_marked():
    tried = [(64, 30 * GIB, False), (32, 16 * GIB, True), (48, 23 * GIB, True)]

    assert str(tables.tried_batches(tried, 32, 48, RTX_3090)).splitlines() == [
        "Batch size 32 fits with 95%; 48 at best (23.7 GiB usable on NVIDIA GeForce RTX 3090, measured)",
        "     batch size  peak (simulated)  of usable     fits",
        "  >          32          16.0 GiB        68%      yes",
        "             48          23.0 GiB        97%  at best",
        "             64          30.0 GiB       127%       no",
        "  at best: fits only if all is as estimated, or because the allocator gives back its cache",
    ]


def test_what_is_unknown_is_called_so():
    text = str(tables.tried_batches([(1, GIB, None)], None, None, MYSTERY))

    assert text.startswith("No batch size fits (unknown usable on")
    assert text.splitlines()[-1].split() == ["1", "1.00", "GiB", "unknown", "unknown"]


@pytest.mark.parametrize(
    ("sure", "best", "text"),
    [
        (48, 48, "Batch size 48 fits with 95% (23.7 GiB usable"),
        (None, 2, "No batch size fits with 95%; 2 at best (23.7 GiB usable"),
    ],
)
def test_the_largest_batch_in_one_sentence(sure, best, text):
    assert tables.tried_batches([(48, 20 * GIB, True)], sure, best, RTX_3090).verdict.startswith(text)

import dataclasses

from memfit.core.estimate import Note
from memfit.core.plan import PlanNotFound
from memfit.reports.estimate import device_tables, figures
from memfit.reports.parts import HARMLESS
from tests.unit.reports.builders import MYSTERY, RTX_3090, make_estimate, make_failed_estimate
from tests.unit.reports.plan_builders import make_plan, make_small_plan


def cells(table):
    return [line.cells for line in table.parts[0].grid.lines]


def test_estimates_have_a_line_each_with_origins():
    table = device_tables.estimates([make_estimate(), make_estimate(device=MYSTERY)])

    assert table.verdict == "ResNet: training, batch size 32, precision float32"
    assert table.is_good
    assert cells(table)[0] == ("NVIDIA GeForce RTX 3090", "1.13 GiB", "23.7 GiB (measured)", "5%", "yes")
    assert cells(table)[1][2:] == ("unknown", "unknown", "unknown")


def test_batches_say_where_none_fits():
    table = device_tables.batches("ResNet", [(64, 68, make_estimate()), (None, None, make_failed_estimate())])

    assert table.verdict == "ResNet: largest batch size"
    assert not table.is_good
    assert [line[1:3] for line in cells(table)] == [("64", "68"), ("none", "none")]


def test_plans_name_their_moves_and_what_is_missing():
    small = dataclasses.replace(make_small_plan())
    lost = PlanNotFound("no plan fits.\nmore", None)
    table = device_tables.plans([(RTX_3090, make_plan()), (RTX_3090, PlanNotFound("no plan", small)), (MYSTERY, lost)])

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
        device_tables.estimates([plain, old]),
        device_tables.batches("ResNet", [(8, 9, plain), (8, 9, old)]),
        device_tables.plans(
            [
                (RTX_3090, dataclasses.replace(make_plan(), notes=plain.notes)),
                (MYSTERY, PlanNotFound("no plan", dataclasses.replace(make_plan(), notes=old.notes))),
            ]
        ),
    ):
        assert [part.title for part in table.parts] == ["Devices", "Notes"]
        assert table.parts[1].lines == tuple(line.replace("Mystery", figures.device_title(MYSTERY)) for line in lines)


def test_values_that_were_read_are_summed_up():
    table = device_tables.estimates([dataclasses.replace(make_estimate(), notes=(READ, READ))])

    assert [line.split(" read")[0] for line in table.parts[1].lines] == ["2 values were"]

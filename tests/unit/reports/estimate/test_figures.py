import dataclasses
import importlib.metadata
from pathlib import Path

import pytest

from memfit.core.device import Kind, Origin
from memfit.core.estimate import AT_MOST, CACHED, CONTEXT, HostMemory, Note
from memfit.core.timeline import Category, Phase, Timeline
from memfit.core.units import MIB
from memfit.reports.estimate import figures
from memfit.reports.parts import Row
from tests.unit.reports.builders import MYSTERY, RTX_3090, Recorder, make_estimate, make_failed_estimate

GOLDEN = Path(__file__).parents[1] / "golden"


def with_usable(size_bytes):
    return make_estimate(device=dataclasses.replace(RTX_3090, usable_bytes=size_bytes))


def test_verdict_says_what_is_needed_and_what_there_is():
    assert figures.verdict(make_estimate()) == "1.13 GiB needed, 23.7 GiB usable on NVIDIA GeForce RTX 3090: fits (99%)"
    assert figures.verdict(with_usable(1000 * MIB)).endswith(
        "1000.0 MiB usable on NVIDIA GeForce RTX 3090: does not fit (99%)"
    )


def test_unknown_capacity_is_called_unknown():
    verdict = figures.verdict(make_estimate(device=MYSTERY))

    assert verdict == "1.13 GiB needed, unknown usable on Mystery accelerator: whether it fits is unknown"


def test_what_does_not_fit_needs_as_much_as_where_it_would():
    # GIVEN a step that runs out on its device
    estimate = make_failed_estimate()

    # THEN the need is that of the whole step, and the failure is told beside it
    assert estimate.peak_bytes == make_estimate().peak_bytes
    assert figures.verdict(estimate).startswith("1.13 GiB needed, 900.0 MiB usable")
    assert figures.failure(estimate) == (
        "runs out in the forward pass of step 1, at aten.native_batch_norm (8.00 MiB) in layer2.11.norm, model.py:32, "
        "with 538.4 MiB allocated and 560.0 MiB reserved (simulated)"
    )
    assert figures.failure(make_estimate()) is None


@pytest.mark.parametrize(
    ("usable_mib", "answer"),
    [
        (2000, "fits (99%)"),
        (1165, "fits (99%)"),
        (1130, "does not fit (50%): 30.0 MiB above the limit"),
        (1100, "does not fit (85%): 60.0 MiB above the limit"),
        (900, "does not fit (99%)"),
    ],
)
def test_verdicts_say_how_sure_they_are_and_how_near_the_limit_is(usable_mib, answer):
    assert figures.sure_answer(with_usable(usable_mib * MIB)) == answer


def test_what_only_an_upper_bound_refuses_has_no_probability():
    bounded = dataclasses.replace(with_usable(1100 * MIB), notes=(Note(AT_MOST, "1 GiB"),))

    assert figures.sure_answer(bounded) == "may not fit, depending on data"
    assert figures.sure_cell(bounded) == "no"
    assert figures.certainty(bounded).endswith("; at least 1.02 GiB, depending on data")


def test_an_interval_names_its_widest_part():
    assert figures.certainty(make_estimate(device=MYSTERY)) == "95% interval 1.11 to 1.22 GiB, most of it for cuDNN"
    assert figures.ranges(make_estimate()) == (
        "tensors: 23.2 MiB more or less (published runs)",
        "cuDNN: nothing less to 81.2 MiB more (its manual; given up where memory is short)",
    )
    assert figures.interval(make_estimate(spreads=())) == "1.13 to 1.13 GiB"


def test_rows_are_sorted_and_add_up():
    estimate = make_estimate()

    rows = figures.rows(estimate.breakdown.by_category, estimate.peak_bytes)

    assert [row.size_bytes for row in rows] == sorted((row.size_bytes for row in rows), reverse=True)
    assert sum(row.size_bytes for row in rows) == estimate.peak_bytes
    assert sum(row.share for row in rows) == pytest.approx(1)


def test_top_rows_leave_out_context_and_allocator():
    names = [row.name for row in figures.top_rows({CACHED: 9, CONTEXT: 8, "conv": 2, "norm": 1}, 20, 5)]

    assert names == ["conv", "norm"]


def test_rows_of_an_empty_peak_have_no_share():
    assert figures.rows({"conv": 0}, 0) == (Row("conv", 0, 0.0),)


def test_every_figure_known_has_an_origin():
    shown = {figure.label: figure for figure in figures.figures(make_estimate())}

    assert shown["needed on the device"].origin == "simulated"
    assert shown["usable on the device"].origin == "measured"
    assert shown["CUDA context"].origin == "assumed"
    assert shown["host memory"].origin == "assumed"
    assert all(figure.origin for figure in shown.values())


def test_a_measured_context_is_called_measured():
    device = dataclasses.replace(RTX_3090, context_origin=Origin.MEASURED)
    shown = {figure.label: figure for figure in figures.figures(make_estimate(device=device))}

    assert shown["CUDA context"].origin == "measured"


def test_unknown_is_never_zero():
    # GIVEN an estimate of which little is known
    estimate = make_estimate(device=MYSTERY, context_bytes=0, host=HostMemory({}), num_parameters=0, batch_size=None)

    # THEN what isn't known is called so, and has no origin
    shown = {figure.label: figure for figure in figures.figures(estimate)}
    for label in ("usable on the device", "CUDA context", "host memory"):
        assert (shown[label].value, shown[label].origin) == ("unknown", "")
    assert figures.parameters(estimate) == "unknown"
    assert "batch size unknown" in figures.headline(estimate)


def test_a_host_has_no_cuda_context():
    host = dataclasses.replace(RTX_3090, kind=Kind.HOST)

    assert figures.context(make_estimate(device=host, context_bytes=0)) == "none"


@pytest.mark.parametrize("bad", ["\x1b[2J", "a\nb", "\u202egpj", "\ud800"])
def test_printable_defuses_control_characters(bad):
    assert figures.printable(f"conv {bad}").isprintable()
    assert figures.printable("Schicht 1 \u00e9\u5c42") == "Schicht 1 \u00e9\u5c42"


def test_package_version_is_unknown_without_an_install(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert figures.package_version() == "unknown"

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.2.3")
    assert figures.package_version() == "1.2.3"


def test_text_is_as_agreed():
    """The whole text; to change it, write `format_estimate(make_estimate())` to the golden file and read the change."""
    assert figures.format_estimate(make_estimate()) + "\n" == (GOLDEN / "estimate.txt").read_text(encoding="utf-8")


def test_text_of_a_failure_is_as_agreed():
    assert figures.format_estimate(make_failed_estimate()) + "\n" == (GOLDEN / "failed.txt").read_text(encoding="utf-8")


def test_text_is_ascii_and_narrow():
    text = figures.format_estimate(make_estimate(notes=()))

    assert text.isascii()
    assert "Notes" not in text
    assert not text.endswith("\n")


def test_unknown_is_spelled_out():
    text = figures.format_estimate(make_estimate(device=MYSTERY, context_bytes=0, host=HostMemory({})))

    assert "unknown usable on Mystery accelerator: whether it fits is unknown" in text
    assert "Host memory: unknown" in text
    assert " 0 B" not in text


def test_names_cannot_steer_the_terminal():
    # GIVEN names with escape sequences
    bad = "\x1b[31mred\n"
    record = Recorder()
    record.mark(Phase.SETUP, 0)
    record.allocate(MIB, Category.PARAMETER, bad, bad, bad)

    # WHEN they are written
    text = figures.format_estimate(make_estimate(record.timeline(), subject=bad, notes=(Note(bad, bad, bad),)))

    # THEN only the text's own line ends are left
    assert "\x1b" not in text
    assert all(line.isprintable() for line in text.split("\n"))


def test_nothing_allocated_is_no_error():
    assert "Peak nothing is allocated" in figures.format_estimate(make_estimate(Timeline((), 0)))

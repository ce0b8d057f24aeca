import dataclasses
import io
import re

import pytest
from rich.console import Console

from memfit.core.estimate import Note
from memfit.core.timeline import Category, Phase
from memfit.core.units import GIB, MIB
from memfit.reports.estimate import figures
from memfit.reports.estimate.tables import tried_batches
from memfit.reports.terminal import render_comparison, render_devices, render_estimate, render_report
from tests.unit.reports.builders import (
    MYSTERY,
    RTX_3090,
    Recorder,
    make_estimate,
    make_failed_estimate,
    make_timeline,
)


def draw(renderable, width=120, **options):
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(renderable)
    return console.file.getvalue()


def lines_of(text):
    """Cells of each line of a table, by the first."""
    rows = (re.split(r"  +", line.strip()) for line in text.splitlines())
    return {row[0]: row[1:] for row in rows}


def test_estimate_shows_verdict_breakdown_and_notes():
    text = draw(render_estimate(make_estimate()))

    for part in (
        "1.13 GiB needed, 23.7 GiB usable on NVIDIA GeForce RTX 3090: fits (99%)",
        "95% interval 1.11 to 1.22 GiB, most of it for cuDNN",
        "Peak in the backward pass of step 2",
        "activation",
        "CUDA context",
        "Largest modules at the peak (top 5)",
        "model.py:31",
        "Host memory: 1.64 GiB",
        "simulated",
        "data-dependent-shape: A shape depends on data",
    ):
        assert part in text


def test_colours_only_on_a_terminal():
    assert "\x1b[" not in draw(render_estimate(make_estimate()))
    assert "\x1b[" in draw(render_estimate(make_estimate()), force_terminal=True, color_system="standard")


def test_bars_are_ascii_where_the_console_is():
    # GIVEN a console that can only write ASCII
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")

    # WHEN the estimate is printed
    Console(file=stream, width=120).print(render_estimate(make_estimate()))

    # THEN bars are drawn with what there is
    stream.seek(0)
    assert "######" in stream.read()


def test_failure_is_told():
    assert "runs out in the forward pass of step 1, at" in draw(render_estimate(make_failed_estimate()))


def test_names_are_not_markup():
    record = Recorder()
    record.mark(Phase.SETUP, 0)
    record.allocate(MIB, Category.PARAMETER, "[red]x[/]", "op", "[/nothing]")
    estimate = make_estimate(record.timeline(), subject="[bold]S[/]", notes=(Note("[a]", "[/b]", "[c]"),))

    text = draw(render_estimate(estimate)) + draw(render_comparison([estimate]))

    for name in ("[red]x[/]", "[/nothing]", "[bold]S[/]", "[a]: [/b] ([c])"):
        assert name in text


def test_comparison_has_a_column_each_and_the_saving_last():
    # GIVEN a step, the same at half the size, and the first again
    first = make_estimate()
    half = make_estimate(make_timeline(scale=MIB // 2), subject="half", batch_size=16, device=MYSTERY)

    # WHEN they are compared
    rows = lines_of(draw(render_comparison([first, half, first])))

    # THEN each row has three values and the last tells the saving
    assert rows["peak (simulated)"] == ["1.13 GiB", "740.0 MiB", "1.13 GiB"]
    assert rows["usable"] == ["23.7 GiB (measured)", "unknown", "23.7 GiB (measured)"]
    assert rows["fits"] == ["yes, 99%", "unknown", "yes, 99%"]
    assert rows["batch size"] == ["32", "16", "32"]
    assert rows["activations"] == ["656.0 MiB", "328.0 MiB", "656.0 MiB"]
    assert rows["peak against the first"] == ["-", "-420.0 MiB (-36.2%)", "no change"]
    assert {"parameters", "CUDA context", "gradients", "optimizer state"} <= rows.keys()
    assert {"allocated (simulated)", "host memory (assumed)"} <= rows.keys()


def test_comparison_of_a_larger_one_says_so():
    rows = lines_of(draw(render_comparison([make_estimate(make_timeline(scale=MIB // 2)), make_estimate()])))

    assert rows["peak against the first"] == ["-", "+420.0 MiB (+56.8%)"]


def test_a_comparison_has_the_notes_with_their_device():
    noted = dataclasses.replace(make_estimate(device=MYSTERY), notes=(Note("device-lacks-precision", "no bfloat16"),))
    text = draw(render_comparison([dataclasses.replace(make_estimate(), notes=()), noted]))

    assert f"{figures.device_title(MYSTERY)}: device lacks precision: no bfloat16" in text


def test_a_model_on_several_devices_is_told_apart_on_a_narrow_terminal():
    text = draw(render_comparison([make_estimate(), make_estimate(device=MYSTERY)]), width=40)

    peaks = "".join(text.partition("peak (simulated)\n")[2].partition("allocated (simulated)\n")[0].split())
    assert "RTX" in peaks and "Mystery" in peaks


def test_devices_show_origin_and_unknown():
    text = draw(render_devices([RTX_3090, MYSTERY]), width=200)
    rows = lines_of(text)

    assert rows["rtx-3090"][1:6] == ["24.0 GiB", "23.7 GiB", "~300.0 MiB", "8.6", "871.7 GiB/s"]
    assert rows["mystery"][1:] == ["unknown"] * 5
    assert "~ assumed; other usable and context sizes were measured" in text
    alone = lines_of(draw(render_devices([RTX_3090]), width=200))
    assert alone["rtx-3090"][2:4] == ["23.7 GiB (measured)", "300.0 MiB (assumed)"]


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 120, 200])
def test_no_width_crops_a_figure_of_any_report(width):
    long_name = "encoder.layers.10.self_attention.output_projection.dense.weight_and_more"
    record = Recorder()
    record.mark(Phase.FORWARD, 1)
    for number in range(3):
        record.allocate((100 + number) * MIB, Category.ACTIVATION, f"{long_name}.{number}", "op", f"train.py:{number}")
    estimate = make_estimate(record.timeline())
    shown = {
        "estimate": render_estimate(estimate),
        "comparison": render_comparison([make_estimate(), estimate]),
        "devices": render_devices([RTX_3090, MYSTERY]),
        "device": render_devices([RTX_3090]),
        "batches": render_report(tried_batches([(8, GIB, True), (1024, 100 * GIB, False)], 8, 8, RTX_3090)),
    }
    # Figures, their units apart, and words that are part of a figure: none is cut, at any width.
    whole = {
        name: set(re.findall(r"[\d.]+%|~?[\d.]+(?= [KMGT]iB)|simulated|measured", draw(part, width=200)))
        for name, part in shown.items()
    }

    for name, part in shown.items():
        text = draw(part, width=width)
        assert max(map(len, text.splitlines())) <= width, name
        assert "\u2026" not in text, name
        assert [figure for figure in sorted(whole[name]) if figure not in text] == [], name


def test_bars_are_the_first_to_go():
    drawn = {width: draw(render_estimate(make_estimate()), width=width) for width in (60, 80, 120)}

    assert [("\u2588" in text, "56.6%" in text) for text in drawn.values()] == [
        (False, True),
        (True, True),
        (True, True),
    ]


def test_a_single_device_shows_its_source():
    assert "source: torch's own error message, 2026-11-01" in draw(render_devices([RTX_3090]), width=200)
    assert "source: unknown" in draw(render_devices([MYSTERY]), width=200)


def test_unknown_context_is_not_zero():
    device = dataclasses.replace(RTX_3090, context_bytes=None)

    rows = lines_of(draw(render_comparison([make_estimate(device=device, context_bytes=0)])))

    assert rows["CUDA context"] == ["unknown"]

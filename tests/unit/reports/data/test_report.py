import io

import pytest
from rich.console import Console

from memfit.data.convert import convert_data
from memfit.data.inspection import inspect_data
from memfit.data.speed import bench_data
from memfit.reports.data import figures
from memfit.reports.terminal import render_report


@pytest.fixture
def path(tmp_path):
    import numpy as np

    np.save(tmp_path / "[red]x.npy", np.linspace(0, 1e-40, 3000).reshape(1000, 3))
    return tmp_path / "[red]x.npy"


def rendered(report):
    console = Console(file=io.StringIO(), width=160, force_terminal=True, color_system="standard")
    console.print(render_report(report))
    return console.file.getvalue()


def test_an_inspection_in_colour(path):
    said = rendered(figures.inspection_report(inspect_data(path)))

    assert "\x1b[1;32m" in said
    assert "[red]x.npy: 1,000 samples" in said
    assert "Worth changing" in said


def test_values_that_were_lost_are_not_missed(path, tmp_path):
    lossless = rendered(figures.conversion_report(convert_data(path, tmp_path / "same.npy")))
    lossy = rendered(figures.conversion_report(convert_data(path, tmp_path / "small.npy", dtype="float32")))

    assert "\x1b[1;32m" in lossless
    assert "\x1b[1;33m" in lossy
    assert "became subnormal" in lossy


def test_speed_in_colour(path):
    assert "plain read of the same files" in rendered(figures.speed_report(bench_data(path, seconds=0.01)))

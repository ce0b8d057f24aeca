import io

import pytest
from rich.console import Console

from memfit.data.convert import convert
from memfit.data.inspection import inspect
from memfit.data.speed import measure_speed
from memfit.reports import data_terminal


@pytest.fixture
def path(tmp_path):
    import numpy as np

    np.save(tmp_path / "[red]x.npy", np.linspace(0, 1e-40, 3000).reshape(1000, 3))
    return tmp_path / "[red]x.npy"


def rendered(renderable):
    console = Console(file=io.StringIO(), width=160, force_terminal=True, color_system="standard")
    console.print(renderable)
    return console.file.getvalue()


def test_an_inspection_in_colour(path):
    said = rendered(data_terminal.render_inspection(inspect(path)))

    assert "\x1b[1;32m" in said
    assert "[red]x.npy: 1,000 samples" in said
    assert "Worth changing" in said


def test_values_that_were_lost_are_not_missed(path, tmp_path):
    lossless = rendered(data_terminal.render_conversion(convert(path, tmp_path / "same.npy")))
    lossy = rendered(data_terminal.render_conversion(convert(path, tmp_path / "small.npy", dtype="float32")))

    assert "\x1b[1;32m" in lossless
    assert "\x1b[1;33m" in lossy
    assert "became subnormal" in lossy


def test_speed_in_colour(path):
    assert "plain read of the same files" in rendered(data_terminal.render_speed(measure_speed(path, seconds=0.01)))

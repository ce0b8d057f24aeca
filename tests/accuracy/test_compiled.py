"""Compiled steps against real runs of Inductor on the CPU; the whole table is `python -m benchmarks.compiled_steps`."""

import pytest
import torch

from benchmarks import compiled_steps

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ["convnet", "gpt"])
def test_a_compiled_model_takes_what_was_measured(name):
    measured = compiled_steps.read_measured()[name]
    threads = torch.get_num_threads()
    try:
        predicted, _ = compiled_steps.predict(name)
    finally:
        torch.set_num_threads(threads)

    for bytes_predicted, bytes_measured in zip(predicted, measured, strict=True):
        assert bytes_predicted == pytest.approx(bytes_measured, rel=compiled_steps.LIMIT)

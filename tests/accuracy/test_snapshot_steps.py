"""A sample of `python -m benchmarks.snapshot_steps`: programs against snapshots of real GPUs."""

import pytest

pytest.importorskip("torch")

from benchmarks import snapshot_steps
from benchmarks.cuda_snapshots import DEFAULT_FOLDER
from benchmarks.snapshot_models.programs import program_of

if not DEFAULT_FOLDER.is_dir():
    pytest.skip("the snapshots (../shared/data/cuda_snapshots) are not beside this repository", allow_module_level=True)


def compared(name):
    program = program_of(name)
    assert program is not None
    return snapshot_steps.compared(DEFAULT_FOLDER / f"{name}.pickle.xz", program)


@pytest.mark.parametrize(
    "name",
    [
        "niu_forward_100",
        "niu_forward_200_mixed_precision",
        "niu_forward_and_backward_150",
        "niu_forward_and_backward_200_mixed_precision",
    ],
)
def test_forward_passes_and_whole_steps_are_the_same_event_for_event(name):
    result = compared(name)

    assert result.is_same
    assert result.simulated.allocated_peak_bytes == result.real.allocated_peak_bytes
    assert result.simulated.reserved_peak_bytes == result.real.reserved_peak_bytes


@pytest.mark.parametrize("name", ["eor", "ckpttry_rm_save_to_frame"])
def test_an_image_and_a_checkpointed_perceptron(name):
    result = compared(name)

    assert result.simulated.allocated_peak_bytes == pytest.approx(result.real.allocated_peak_bytes, rel=0.001)

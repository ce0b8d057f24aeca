"""Rules by release against snapshots of real GPUs that others published."""

import json

import pytest

from benchmarks.cuda_snapshots import DEFAULT_FOLDER
from memfit.core.stack import read_stack
from memfit.frameworks.torch.stack import cublas_workspace_bytes, cublaslt_workspace
from memfit.snapshots.reader import read_snapshot

if not DEFAULT_FOLDER.is_dir():
    pytest.skip("the snapshots are not part of this repository", allow_module_level=True)

RELEASES = {
    entry["name"]: "torch" + ".".join(entry["torch"]["version"].split(" ")[0].split(".")[:2])
    for entry in map(json.loads, (DEFAULT_FOLDER / "INDEX.jsonl").read_text(encoding="utf-8").splitlines())
}


def taken_in(name, functions):
    """Sizes of what was allocated while one of the functions of PyTorch ran."""
    events = read_snapshot(DEFAULT_FOLDER / f"{name}.pickle.xz").history()
    taken = [event for event in events if event.action == "alloc"]
    return [e.size_bytes for e in taken if any(word in frame.name for frame in e.frames for word in functions)]


@pytest.mark.parametrize("name", ["eor", "niu_forward_100", "niu_forward_and_backward_200"])
def test_the_workspace_of_cublas_is_that_of_its_release(name):
    sizes = taken_in(name, ["getNewWorkspace", "getCurrentCUDABlasHandle"])

    assert sizes
    assert set(sizes) == {cublas_workspace_bytes(read_stack(RELEASES[name]), (8, 0))}


def test_products_with_a_bias_take_what_their_release_gives_cublaslt():
    size, is_kept = cublaslt_workspace(read_stack(RELEASES["eor"]))

    assert taken_in("eor", ["gemm_and_bias"]) == [size] * 30
    assert not is_kept

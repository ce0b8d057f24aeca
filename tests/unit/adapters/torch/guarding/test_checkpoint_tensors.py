"""Tensor files are safetensors files, read back to the bit, with a few megabytes of memory whatever their size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from memfit.adapters.torch.guarding import checkpoint_tensors
from memfit.adapters.torch.guarding.checkpoint_tensors import TensorFile, write_tensors
from memfit.core.guarding import BadCheckpoint

DTYPES = sorted(checkpoint_tensors._NAMES, key=str)


def example(dtype, shape=(3, 5)):
    size_bytes = torch.Size(shape).numel() * dtype.itemsize
    values = torch.randint(0, 2 if dtype is torch.bool else 256, (size_bytes,), dtype=torch.uint8)
    return values.view(dtype).view(shape) if size_bytes else torch.empty(shape, dtype=dtype)


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []


def test_every_type_is_read_by_safetensors_and_back(tmp_path):
    # GIVEN tensors of every type, with any bits
    tensors = {str(dtype): example(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4), "one": torch.ones(1, dtype=torch.bool)}
    path = tmp_path / "a.safetensors"

    # WHEN they are written
    write_tensors(path, tensors)

    # THEN the library of the format reads them
    read = safetensors.torch.load_file(path)
    assert read.keys() == tensors.keys()
    assert all(bits(read[name]) == bits(tensor) for name, tensor in tensors.items())
    assert all(read[name].shape == tensor.shape for name, tensor in tensors.items())

    # AND so does this module
    file = TensorFile(path)
    assert sorted(file.names()) == sorted(tensors)
    for name, tensor in tensors.items():
        target = torch.empty_like(tensor)
        file.copy_into(name, target)
        assert bits(target) == bits(tensor), name


def test_files_of_the_library_are_read(tmp_path):
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.zeros(())}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", metadata={"x": "y"})
    file = TensorFile(tmp_path / "a.safetensors")

    for name, tensor in tensors.items():
        target = torch.empty_like(tensor)
        file.copy_into(name, target)
        assert torch.equal(target, tensor)


def test_a_type_that_the_format_lacks_is_stored_as_bytes(tmp_path):
    value = torch.randn(2, 3, dtype=torch.complex128)
    write_tensors(tmp_path / "a", {"x": value})
    file = TensorFile(tmp_path / "a")
    target = torch.empty_like(value)
    file.copy_into("x", target)

    assert (file.dtype("x"), file.shape("x")) == (torch.uint8, (2, 3, 16))
    assert torch.equal(target, value)


@examples(max_examples=60)
@given(
    shape=st.lists(st.integers(0, 7), min_size=0, max_size=4),
    order=st.randoms(use_true_random=False),
    chunk=st.integers(1, 64),
)
def test_any_layout_keeps_its_values_and_the_target_its_layout(tmp_path_factory, shape, order, chunk):
    # GIVEN a tensor and a target with their dimensions in any order in memory, and a small buffer
    def permuted():
        dims = list(range(len(shape)))
        order.shuffle(dims)
        back = [dims.index(dim) for dim in range(len(shape))]
        return torch.randn([shape[dim] for dim in dims]).permute(back)

    source, target = permuted(), permuted()
    stride = target.stride()
    path = tmp_path_factory.mktemp("layout") / "a"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_tensors, "CHUNK_BYTES", chunk)
        write_tensors(path, {"x": source})
        TensorFile(path).copy_into("x", target)

    assert torch.equal(source, target)
    assert target.stride() == stride
    assert torch.equal(safetensors.torch.load_file(path)["x"], source)


def test_lazy_views_are_resolved(tmp_path):
    value = torch.randn(3, dtype=torch.complex64)
    tensors = {"conjugated": value.conj(), "negated": value.conj().imag}
    write_tensors(tmp_path / "a", tensors)

    for name, tensor in safetensors.torch.load_file(tmp_path / "a").items():
        assert torch.equal(tensor, tensors[name].resolve_conj().resolve_neg())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no sensible length"),
        (b"\x00" * 8, "no sensible length"),
        (b"\xff" * 40, "no sensible length"),
        (b"\x02\0\0\0\0\0\0\0[]", "safetensors"),
        (b"\x02\0\0\0\0\0\0\0{]", "safetensors"),
    ],
)
def test_what_is_no_tensor_file_is_refused(tmp_path, content, reason):
    (tmp_path / "a").write_bytes(content)

    with pytest.raises(BadCheckpoint, match=reason):
        TensorFile(tmp_path / "a")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]},
        {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        "F32",
    ],
)
def test_headers_that_lie_are_refused(tmp_path, entry):
    header = json.dumps({"x": entry}).encode()
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))

    with pytest.raises(BadCheckpoint, match="is no safetensors file, or is damaged"):
        TensorFile(tmp_path / "a")


def test_a_missing_file_and_one_cut_after_it_was_opened(tmp_path):
    with pytest.raises(BadCheckpoint, match="can't be read"):
        TensorFile(tmp_path / "a")
    write_tensors(tmp_path / "a", {"x": torch.ones(100)})
    file = TensorFile(tmp_path / "a")
    os.truncate(tmp_path / "a", 200)

    with pytest.raises(BadCheckpoint, match="ends in the middle of 'x'"):
        file.copy_into("x", torch.empty(100))


MEMORY = """
import resource, sys, torch
from pathlib import Path
from memfit.adapters.torch.guarding.checkpoint_tensors import TensorFile, write_tensors
tensors = {
    "plain": torch.ones(16_000_000),
    "permuted": torch.ones(200, 400, 5, 40).permute(0, 3, 1, 2),
    "one": torch.ones(4_000_000),
}
write_tensors(Path(sys.argv[1]) / "warm", {"x": torch.ones(3)})
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
write_tensors(Path(sys.argv[1]) / "a", tensors)
file = TensorFile(Path(sys.argv[1]) / "a")
for name, tensor in tensors.items():
    file.copy_into(name, tensor)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak of resident memory in KiB only on Linux")
def test_memory_is_bounded_whatever_the_size(tmp_path):
    source = Path(__file__).parents[5] / "src"
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(source)},
    )

    assert done.returncode == 0, done.stderr
    # 144 MB of tensors, two of 64 MB; a buffer or two of 8 MiB on the way.
    assert int(done.stdout) < 40e6

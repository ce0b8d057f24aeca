"""Tensor files are safetensors files, read back to the bit, with a few megabytes of memory whatever their size."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from memfit.core import tensor_file
from memfit.core.guarding import BadCheckpoint
from memfit.core.tensor_file import TensorFile
from memfit.frameworks.torch.guard.checkpoint_tensors import (
    TensorDecoder,
    TensorEncoder,
    copy_into,
    described,
    write_tensors,
)

DTYPES = [getattr(torch, name) for name in tensor_file.FORMAT]


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
        copy_into(file, name, target)
        assert bits(target) == bits(tensor), name


def test_files_of_the_library_are_read(tmp_path):
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.zeros(())}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", metadata={"x": "y"})
    file = TensorFile(tmp_path / "a.safetensors")

    for name, tensor in tensors.items():
        target = torch.empty_like(tensor)
        copy_into(file, name, target)
        assert torch.equal(target, tensor)


def test_a_type_that_the_format_lacks_is_stored_as_bytes(tmp_path):
    value = torch.randn(2, 3, dtype=torch.complex128)
    write_tensors(tmp_path / "a", {"x": value})
    file = TensorFile(tmp_path / "a")
    target = torch.empty_like(value)
    copy_into(file, "x", target)

    assert (file.dtype("x"), file.shape("x")) == ("uint8", (2, 3, 16))
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
        patch.setattr(tensor_file, "CHUNK_BYTES", chunk)
        write_tensors(path, {"x": source})
        copy_into(TensorFile(path), "x", target)

    assert torch.equal(source, target)
    assert target.stride() == stride
    assert torch.equal(safetensors.torch.load_file(path)["x"], source)


def test_lazy_views_are_resolved(tmp_path):
    value = torch.randn(3, dtype=torch.complex64)
    tensors = {"conjugated": value.conj(), "negated": value.conj().imag}
    write_tensors(tmp_path / "a", tensors)

    for name, tensor in safetensors.torch.load_file(tmp_path / "a").items():
        assert torch.equal(tensor, tensors[name].resolve_conj().resolve_neg())


MEMORY = """
import resource, sys, torch
torch.set_num_threads(1)
from pathlib import Path
from memfit.frameworks.torch.guard.checkpoint_tensors import TensorFile, copy_into, write_tensors
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
    copy_into(file, name, tensor)
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


# Tags in the tree.


def round_trip(value, tmp_path):
    encoder = TensorEncoder()
    text = json.dumps(encoder.encode(value, "top"), allow_nan=False)
    write_tensors(tmp_path / "a", encoder.tensors)
    return TensorDecoder(TensorFile(tmp_path / "a")).decode(json.loads(text))


@pytest.mark.parametrize("value", [torch.Size([2, 3]), torch.float16, torch.device("cpu"), {"a": (1, [2])}])
def test_types_are_kept(tmp_path, value):
    back = round_trip(value, tmp_path)

    assert back == value
    assert type(back) is type(value)


def test_a_dictionary_with_defaults_becomes_a_plain_one(tmp_path):
    back = round_trip(defaultdict(dict, {1: {"a": 2}}), tmp_path)

    assert back == {1: {"a": 2}}
    assert type(back) is dict


def test_tensors_come_back_with_type_and_layout(tmp_path):
    value = {
        "image": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(3.0),
        "half": torch.randn(3).bfloat16(),
        "array": numpy.arange(3),
        "whole": torch.arange(3),
        "wide": torch.randn(2, dtype=torch.complex128),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    back = round_trip(value, tmp_path)

    numpy.testing.assert_array_equal(back.pop("array"), value.pop("array"))
    for name, tensor in value.items():
        assert torch.equal(back[name], tensor), name
        assert back[name].dtype == tensor.dtype
        if name != "expanded":
            assert back[name].stride() == tensor.stride()
        assert not back[name].requires_grad


def test_a_tensor_with_two_names_is_stored_once():
    encoder = TensorEncoder()
    tensor = torch.ones(3)
    encoded = encoder.encode({"a": tensor, "b": tensor, "c": tensor[:2], "d": torch.empty(0), "e": torch.empty(0)}, "x")

    assert list(encoder.tensors) == ["x.a", "x.c", "x.d", "x.e"]
    assert encoded["b"]["__tensor__"] == "x.a"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": torch.eye(3).to_sparse()}, r"^x\.a is a tensor of layout torch\.sparse_coo"),
        ({"a": torch.empty(3, device="meta")}, r"^x\.a is a tensor without values"),
        ({"a": torch.nn.parameter.UninitializedParameter()}, r"^x\.a is a parameter that has no shape yet"),
        ({"a": object()}, r"^x\.a is a builtins\.object"),
    ],
)
def test_special_tensors_are_refused_by_name(value, message):
    with pytest.raises(BadCheckpoint, match=message):
        TensorEncoder().encode(value, "x")


@pytest.mark.parametrize(
    "tree",
    [
        {"__unknown__": 1},
        {"__tensor__": "gone", "dtype": "float32"},
        {"__tensor__": "x", "dtype": "load"},
        {"__tensor__": "x", "dtype": "int64"},
        {"__device__": "nowhere"},
    ],
)
def test_trees_that_were_not_made_here_are_refused(tmp_path, tree):
    write_tensors(tmp_path / "a", {"x": torch.ones(3)})

    with pytest.raises(BadCheckpoint):
        TensorDecoder(TensorFile(tmp_path / "a")).decode([tree])


def test_shapes_of_types_that_the_format_lacks(tmp_path):
    write_tensors(tmp_path / "a", {"x": torch.ones(3, dtype=torch.complex128)})

    tag = {"__tensor__": "x", "dtype": "complex128"}
    assert described(TensorFile(tmp_path / "a"), tag) == (torch.complex128, (3,))

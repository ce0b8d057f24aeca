"""The stand-in for flash_attn: the memory of PyTorch's own flash attention, under the package's names."""

import importlib.metadata
import importlib.util
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch.nn import functional as F

import memfit

pytestmark = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash_attn is installed")


@contextmanager
def simulated(device="a100-40gb"):
    """A device as the process of a script sees it."""
    with memfit.simulate(device) as shown, shown._session.simulation.with_stand_ins():
        yield shown


BATCH, ROWS, HEADS, WIDTH = 2, 300, 8, 64


def inputs(*shapes, dtype=torch.bfloat16):
    return [torch.zeros(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]


def sizes_of(device):
    """Bytes of all that attention allocated, how often each."""
    return Counter(b.size_bytes for b in device.estimate().timeline.blocks if "attention" in b.op)


@pytest.mark.parametrize("num_groups", [HEADS, 2])
def test_whole_sequences_take_what_pytorch_takes(num_groups):
    shapes = [(BATCH, ROWS, heads, WIDTH) for heads in (HEADS, num_groups, num_groups)]
    with simulated() as device:
        from flash_attn import flash_attn_func

        out = flash_attn_func(*inputs(*shapes), dropout_p=0.1, causal=True)
        out.backward(torch.zeros_like(out))
        assert out.shape == shapes[0]
    with memfit.simulate("a100-40gb") as plain:
        query, key, value = (tensor.transpose(1, 2) for tensor in inputs(*shapes))
        out = F.scaled_dot_product_attention(
            query, key, value, dropout_p=0.1, is_causal=True, enable_gqa=num_groups < HEADS
        )
        out.backward(torch.zeros_like(out))

    assert sizes_of(device) == sizes_of(plain)


@pytest.mark.parametrize(
    "function", ["flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func"]
)
def test_packed_sequences_are_padded_each_by_itself(function):
    total = BATCH * ROWS
    with simulated() as device:
        flash_attn = importlib.import_module("flash_attn")
        ends = torch.tensor([0, ROWS, total], dtype=torch.int32, device="cuda")
        if "qkvpacked" in function:
            (packed,) = given = inputs((total, 3, HEADS, WIDTH))
            out = getattr(flash_attn, function)(packed, ends, ROWS, causal=True)
        else:
            parts = [(2, HEADS, WIDTH)] if "kvpacked" in function else [(HEADS, WIDTH)] * 2
            given = inputs((total, HEADS, WIDTH), *((total, *part) for part in parts))
            out = getattr(flash_attn, function)(*given, ends, ends, ROWS, ROWS, causal=True)
        out.backward(torch.zeros_like(out))
        assert [tensor.grad.shape for tensor in given] == [tensor.shape for tensor in given]

    sizes = [block.size_bytes for block in device.estimate().timeline.blocks]
    # A float32 accumulator of the query's gradient.
    assert sizes.count((total + 128 * BATCH) * HEADS * WIDTH * 4) == 1


def test_inputs_in_one_tensor_have_one_gradient():
    shape = (BATCH, ROWS, 3, HEADS, WIDTH)
    with simulated() as device:
        from flash_attn import flash_attn_qkvpacked_func

        (packed,) = inputs(shape)
        out, sums, _ = flash_attn_qkvpacked_func(packed, causal=True, return_attn_probs=True)
        assert out.shape == (BATCH, ROWS, HEADS, WIDTH)
        assert sums.shape == (BATCH, HEADS, ROWS)
        out.backward(torch.zeros_like(out))

    sizes = [block.size_bytes for block in device.estimate().timeline.blocks]
    whole = torch.Size(shape).numel() * 2
    # The input and its gradient.
    assert sizes.count(whole) == 2


def test_keys_and_values_in_one_tensor_have_one_gradient():
    with simulated() as device:
        from flash_attn import flash_attn_kvpacked_func

        query, packed = inputs((BATCH, ROWS, HEADS, WIDTH), (BATCH, ROWS, 2, HEADS, WIDTH))
        out = flash_attn_kvpacked_func(query, packed, causal=True)
        out.backward(torch.zeros_like(out))
        assert query.grad.shape == query.shape

    sizes = [block.size_bytes for block in device.estimate().timeline.blocks]
    assert sizes.count(packed.numel() * 2) == 2


def test_padding_goes_and_comes_back():
    with simulated():
        from flash_attn.bert_padding import pad_input, unpad_input

        mask = torch.ones(BATCH, ROWS, dtype=torch.int64, device="cuda")
        mask[0, 100:] = 0
        (states,) = inputs((BATCH, ROWS, WIDTH))
        rows, places, ends, longest, lengths = unpad_input(states, mask)
        assert ends.shape == (BATCH + 1,)
        assert lengths.shape == (BATCH,)
        assert 100 < longest <= ROWS
        assert pad_input(rows, places, BATCH, ROWS).shape == states.shape


def test_other_packages_find_its_version_while_it_is_there():
    with simulated():
        assert importlib.metadata.version("flash_attn") == importlib.metadata.version("flash-attn") == "2.8.3"
        assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("flash_attn.layers.rotary")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn")


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [("t4", torch.float16, "only supports Ampere GPUs or newer"), ("a10g", torch.float32, "fp16 and bf16")],
)
def test_what_the_package_refuses_is_refused(device, dtype, message):
    with simulated(device):
        from flash_attn import flash_attn_func

        with pytest.raises(RuntimeError, match=message):
            flash_attn_func(*inputs(*[(BATCH, ROWS, HEADS, WIDTH)] * 3, dtype=dtype))


@pytest.mark.parametrize(
    ("heads", "width", "message"), [((4, 4), 320, "at most 256"), ((4, 3), 64, "must divide number of heads in query")]
)
def test_shapes_that_the_package_refuses_are_refused(heads, width, message):
    with simulated():
        from flash_attn import flash_attn_func

        shapes = [(BATCH, ROWS, number, width) for number in (heads[0], heads[1], heads[1])]
        with pytest.raises(RuntimeError, match=message):
            flash_attn_func(*inputs(*shapes))

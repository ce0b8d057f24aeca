"""A stand-in for the package `flash_attn`, which is built on a machine with a GPU, in simulated scripts.

PyTorch has taken the kernels over from there, with what they allocate. So the package's functions are calls of its own
operators, which are simulated. What isn't here (`flash_attn.ops`, `flash_attn.layers`) can't be imported.
"""

from typing import Any

import torch

from memfit.frameworks.torch.kernels.attention_kernels import scratch_sizes
from memfit.frameworks.torch.shapes.shapes import HALVES
from memfit.frameworks.torch.simulation.stand_ins import Package

LIBRARY = "flash_attn"
_VERSION = "2.8.3"
_WIDEST = 256


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: tuple[torch.Tensor | None, torch.Tensor | None],
    longest: tuple[int, int],
    options: dict[str, Any],
) -> tuple[torch.Tensor, ...]:
    """(output, logarithm of the sum of exponentials, state of the dropout) by PyTorch's own operator."""
    if torch.cuda.get_device_capability() < (8, 0):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    if query.dtype not in HALVES:
        raise RuntimeError("FlashAttention only supports fp16 and bf16 data type")
    heads, width = query.shape[-2:]
    if width > _WIDEST or value.shape[-1] != width:
        raise RuntimeError(f"FlashAttention forward only supports head dimension at most {_WIDEST}, the same for all")
    if heads % key.shape[-2]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    left, right = options.get("window_size", (-1, -1))
    made = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        *boundaries,
        *longest,
        options.get("dropout_p", 0.0),
        options.get("causal", False),
        False,
        scale=options.get("softmax_scale"),
        window_size_left=None if left < 0 else left,
        window_size_right=None if right < 0 else right,
    )
    return tuple(made[:3])


def _answer(made: tuple[torch.Tensor, ...], options: dict[str, Any]) -> Any:
    return (made[0], made[1], None) if options.get("return_attn_probs") else made[0]


class _Packed(torch.autograd.Function):
    """Attention whose inputs are parts of one tensor, which has one gradient.

    `query` is None where it is one of the parts.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Any,
        packed: torch.Tensor,
        dim: int,
        boundaries: tuple[torch.Tensor | None, torch.Tensor | None],
        longest: tuple[int, int],
        options: dict[str, Any],
    ) -> Any:
        """Keeps the tensors as they are."""
        parts = packed.unbind(dim)
        query_part, key, value = parts if query is None else (query, *parts)
        made = _attention(query_part, key, value, boundaries, longest, options)
        ctx.save_for_backward(query, packed, *made)
        ctx.dim, ctx.num_sequences = dim, None if boundaries[0] is None else boundaries[0].numel() - 1
        return made[0], made[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Writes the gradients of all parts into one tensor."""
        query, packed = ctx.saved_tensors[:2]
        made = [None if tensor is None else torch.empty_like(tensor) for tensor in (query, packed)]
        parts = packed.unbind(ctx.dim)
        sizes = scratch_sizes(parts[0] if query is None else query, parts[-1], ctx.num_sequences)
        scratch = [torch.empty(size, dtype=torch.uint8, device=packed.device) for size in sizes]
        del scratch
        return *made, None, None, None, None


_PACKED: Any = _Packed.apply


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Attention over whole sequences: [batch, rows, heads, width]."""
    options = _named(args, kwargs)
    return _answer(_attention(q, k, v, (None, None), (q.shape[1], k.shape[1]), options), options)


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The same for [batch, rows, 3, heads, width]."""
    options = _named(args, kwargs)
    return _answer(_PACKED(None, qkv, 2, (None, None), (qkv.shape[1],) * 2, options), options)


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The same for keys and values as [batch, rows, 2, heads, width]."""
    options = _named(args, kwargs)
    return _answer(_PACKED(q, kv, 2, (None, None), (q.shape[1], kv.shape[1]), options), options)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Attention over sequences one after another: [rows of all, heads, width]."""
    options = _named(args, kwargs)
    longest = int(max_seqlen_q), int(max_seqlen_k)
    return _answer(_attention(q, k, v, (cu_seqlens_q, cu_seqlens_k), longest, options), options)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: Any, *args: Any, **kwargs: Any
) -> Any:
    """The same for [rows of all, 3, heads, width]."""
    options = _named(args, kwargs)
    return _answer(_PACKED(None, qkv, 1, (cu_seqlens,) * 2, (int(max_seqlen),) * 2, options), options)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The same for keys and values as [rows of all, 2, heads, width]."""
    options = _named(args, kwargs)
    longest = int(max_seqlen_q), int(max_seqlen_k)
    return _answer(_PACKED(q, kv, 1, (cu_seqlens_q, cu_seqlens_k), longest, options), options)


def flash_attn_with_kvcache(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention of new rows to a cache, which is only read or written in place."""
    return torch.empty_like(q)


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options that all functions share, by name."""
    return {**dict(zip(("dropout_p", "softmax_scale", "causal", "window_size"), args, strict=False)), **kwargs}


def unpad_input(hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: Any = None) -> Any:
    """(rows that the mask keeps, their places, ends of the sequences, the longest, lengths of the sequences)."""
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    places = attention_mask.flatten().nonzero().flatten()
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), places), places, ends, int(lengths.max()), lengths


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> Any:
    """Rows back in their places, zeros between them."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """Rows in their places, zeros between them."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis(hidden_states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Some of the rows."""
    return hidden_states[indices]


def package() -> Package:
    """The stand-in."""
    functions: dict[str, Any] = {
        function.__name__: function
        for function in (
            flash_attn_func,
            flash_attn_qkvpacked_func,
            flash_attn_kvpacked_func,
            flash_attn_varlen_func,
            flash_attn_varlen_qkvpacked_func,
            flash_attn_varlen_kvpacked_func,
            flash_attn_with_kvcache,
        )
    }
    padding: dict[str, Any] = {
        function.__name__: function for function in (unpad_input, pad_input, index_first_axis, index_put_first_axis)
    }
    modules = {
        LIBRARY: functions,
        f"{LIBRARY}.flash_attn_interface": functions,
        f"{LIBRARY}.bert_padding": padding,
    }
    return Package(LIBRARY, _VERSION, modules)

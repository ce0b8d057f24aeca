"""Memory that CUDA's kernels for indexing take for themselves.

Where several indices may name the same element, the kernels that add to it sort the indices first
(native/cuda/Indexing.cu, EmbeddingBackwardKernel.cu), with CUB's radix sort (dispatch_radix_sort.cuh).
"""

from typing import Any

import torch

from memfit.frameworks.torch.shapes.shapes import Arguments, is_mask, size_bytes

# Up to so many indices, the gradient of an embedding is summed without sorting them.
_UNSORTED_INDICES = 3072
_ROWS_PER_THREAD = 10
_INDEX_BYTES = 8
# CUB sorts as many pairs of 64 bits in one block of threads (256 with nine each), without memory of its own.
_ONE_TILE = 2304
# A pass sorts by eight bits, in blocks of 384 threads with ten pairs each that look at each other's 256 counts.
_PASS_BITS, _PASS_TILE, _BINS = 8, 3840, 256


def sort_bytes(count: int, largest: int) -> int:
    """Temporary storage of CUB's radix sort of `count` pairs of 64 bits by keys of at most `largest`.

    >>> sort_bytes(2000, 9999)
    1
    """
    if count <= _ONE_TILE:
        return 1
    num_passes = -(-max(1, largest.bit_length()) // _PASS_BITS)
    copies = 2 * _INDEX_BYTES * count if num_passes > 1 else 0
    return copies + -(-count // _PASS_TILE) * _BINS * 4 + num_passes * _BINS * 4


def indexing(args: Arguments, out: Any) -> list[int]:
    """What `index` makes of its indices: positions from masks, copies of those that are on the host."""
    return _positions(args[1]) + _host_copies(args[1])


def index_put(args: Arguments, out: Any) -> list[int]:
    """Indices made of masks; and where values are added up, the sorted indices."""
    tensor, indices, values = args[:3]
    if values.numel() == 1 and any(map(is_mask, indices)):
        return []
    accumulates = len(args) > 3 and args[3]
    if not accumulates and not torch.are_deterministic_algorithms_enabled():
        return _positions(indices) + _host_copies(indices)
    return sorted_index_put(tensor, indices, values)


def sorted_index_put(tensor: torch.Tensor, indices: Any, values: torch.Tensor) -> list[int]:
    """Linear indices, sorted and in their old order, and what sorting takes."""
    given = [index for index in indices if index is not None]
    num_indexed = sum(index.dim() if is_mask(index) else 1 for index in given)
    first = next(place for place, index in enumerate(indices) if index is not None)
    # Dimensions after the indexed ones are moved as a whole.
    sliced = 1
    for size in tensor.shape[first + num_indexed :]:
        sliced *= size
    masks = any(map(is_mask, given))
    if masks:
        before = 1
        for size in tensor.shape[:first]:
            before *= size
        count = values.numel() // max(1, sliced * before)
    else:
        count = torch.broadcast_shapes(*(index.shape for index in given)).numel()
    each = _INDEX_BYTES * count
    program = [each * index.dim() for index in given if is_mask(index)]
    for number in range(num_indexed):
        # Wrapped, then times its stride; the first is what the others are added to.
        place = len([size for size in program if size >= 0])
        program += [each, each, ~place, *([~(place + 1)] if number else [])]
    if not values.is_contiguous() or values.numel() < count * sliced:
        program.append(count * sliced * values.element_size())
    largest = tensor.numel() // max(1, sliced) - 1
    return [*program, each, each, each, sort_bytes(count, largest)]


def _positions(indices: Any) -> list[int]:
    """Boolean masks become indices, at most one per element and dimension (native/IndexingUtils.h)."""
    return [index.numel() * index.dim() * _INDEX_BYTES for index in indices if is_mask(index)]


def _host_copies(indices: Any) -> list[int]:
    return [size_bytes(index) for index in indices if index is not None and index.is_cpu and index.dim()]


def embedding_backward(args: Arguments, out: Any) -> list[int]:
    """Sorted indices and sums of their segments, where they are many (EmbeddingBackwardKernel.cu).

    A segment is one word's rows; a thread sums ten of them, so that there may be more parts than words.
    """
    gradient, indices, num_weights = args[:3]
    count, index_bytes = indices.numel(), indices.element_size()
    if count <= _UNSORTED_INDICES:
        return []
    each, num_segments = count * index_bytes, min(count, num_weights)
    num_parts = count // _ROWS_PER_THREAD + num_segments
    # In their new order, where each was before, and a range, which ends with what sorting takes.
    sort = [each, each, each, sort_bytes(count, num_weights), ~3, ~2]
    starts = [each, _INDEX_BYTES, num_segments * index_bytes, num_segments * index_bytes, _INDEX_BYTES]
    return [*sort, *starts, num_parts * index_bytes, num_parts * gradient.shape[-1] * max(4, gradient.element_size())]

"""What `torch.compile` makes of the operators of an eager forward pass: a simple model.

Inductor fuses operators that only move data, one after the other, into one kernel: what is between them is neither
written nor read. Matrix products and convolutions stay library calls; for a forward pass it lays convolutions out
channels last where that is worth it, by its own rule (`GraphLowering.decide_layout_opt` of torch/_inductor/graph.py).
Where the compiled graph itself is at hand, its operators replace what this module makes up.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from memfit.core.profile import ConvolutionSizes
from memfit.timing.table import Kind, Table

_UNFUSED = (Kind.PRODUCT, Kind.CONVOLUTION, Kind.ATTENTION, Kind.ATTENTION_BACKWARD, Kind.RECURRENT)
# Weights of Inductor's rule: time of channels last over that of channels first, by kind of convolution.
_GROUPED, _NARROWING, _SMALL, _OTHER = 1.358, 0.725, 0.783, 0.823
_SMALL_CHANNELS = 64
# A sum writes less than this share of what it reads.
_SHRINKING = 0.1


def compiled(table: Table) -> Table:
    """The kernels of the compiled pass: of each chain of operators that are fused, one."""
    if not len(table):
        return table
    table = _laid_out(table)
    fusable = ~np.isin(table.kind, _UNFUSED)
    # A chain begins where an operator can't be fused, or the one before can't, or another phase begins.
    begins = np.ones(len(table), dtype=bool)
    begins[1:] = ~fusable[1:] | ~fusable[:-1] | (table.phase[1:] != table.phase[:-1])
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(table)) - 1
    written = np.where(fusable, table.moving_sizes.written_bytes, 0.0)
    # All but the last result stay in registers: one write and one read less. What a norm or a sum is made of is
    # used again, by a residual connection or to be scaled, and is written all the same.
    is_used_again = np.zeros(len(table), dtype=bool)
    shrinks = (table.kind[1:] == Kind.REDUCTION) & (written[1:] < _SHRINKING * written[:-1])
    is_used_again[:-1] = (table.kind[1:] == Kind.NORM) | shrinks
    saved = np.where(is_used_again, 1, 2) * written
    saved[last] = 0
    reads = table.moved[first] - written[first] + written[last]
    moved = np.maximum(np.add.reduceat(table.moved - saved, first), reads)
    chains = table.part(first)
    sizes = chains.sizes.copy()
    inside = fusable[first]
    # Orders of inputs and outputs are part of the fused kernel's indices.
    sizes[inside, 1:] = 0
    sizes[inside, 0] = written[last][inside]
    kind = np.where(inside & (last > first), Kind.ELEMENTWISE, chains.kind)
    return replace(chains, kind=kind, moved=np.where(inside, moved, chains.moved), sizes=sizes)


def _laid_out(table: Table) -> Table:
    """Convolutions channels last where Inductor would have them so."""
    chosen = table.kind == Kind.CONVOLUTION
    if not chosen.any() or (table.phase > 0).any() or not _prefers_last(table.part(chosen)):
        return table
    sizes = table.sizes.copy()
    sizes[chosen, ConvolutionSizes._fields.index("is_last")] = 1
    return replace(table, sizes=sizes)


def _prefers_last(convolutions: Table) -> bool:
    sizes, flops = convolutions.convolution_sizes, convolutions.flops
    each = sizes.inputs / np.maximum(sizes.groups, 1)
    is_grouped: NDArray[np.bool_] = sizes.groups > 1
    narrows = (each * 2 <= sizes.outputs) & (sizes.taps > 1)
    is_small = (each <= _SMALL_CHANNELS) & (sizes.outputs <= _SMALL_CHANNELS)
    weight = np.select([is_grouped, narrows, is_small], [_GROUPED, _NARROWING, _SMALL], _OTHER)
    return bool((weight * flops).sum() <= flops.sum())

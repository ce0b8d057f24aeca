"""Seconds that a GPU spends in each kernel of a step.

A matrix product, and a convolution as the product that it is computed by, is cut into tiles that multiprocessors
compute in waves: the last wave may be nearly empty, a narrow matrix fills no tile, and channels that aren't a multiple
of eight numbers waste tensor cores. Beside that, every operand moves through the memory at least once; whichever takes
longer decides. All other operators only move data, some of them several times. Shares of the device's peak rates are in
`parameters.json`, with how they were obtained (benchmarks/fit_step_times.py).
"""

from collections.abc import Mapping

import numpy as np

from memfit.timing.rates import Rates
from memfit.timing.table import DTYPES, Kind, Numbers, Table

Parameters = Mapping[str, float]

# Tiles of cuBLAS's and cuDNN's tensor-core kernels: rows, columns, and the power of a parameter below one that a
# smaller tile's rate has: it loads more numbers for each product.
_TILES = (
    (256, 128, 0.0),
    (128, 256, 0.0),
    (128, 128, 0.3),
    (128, 64, 1.0),
    (64, 128, 1.0),
    (64, 64, 1.7),
    (128, 32, 2.0),
    (32, 128, 2.0),
    (32, 32, 4.0),
)
# Parts into which the summed dimension is split where there are too few tiles.
_SPLITS = (1, 4, 16, 64)
# Numbers in a row that tensor cores take in one instruction.
_ALIGNMENT = 8
# Rate of 16-bit products over that of float32 on the plain units, where tensor cores are easy to feed.
_USUAL_RATIO = 2.0
FORWARD, INPUT, WEIGHT = 0, 1, 2


def kernel_seconds(table: Table, rates: Rates, parameters: Parameters) -> Numbers:
    """Seconds of each operator, without the time to launch it."""
    seconds = _moving(table, rates, parameters)
    is_product = table.kind == Kind.PRODUCT
    is_known = np.where(is_product, table.product_sizes.rows, table.convolution_sizes.inputs) > 0
    rules = ((Kind.PRODUCT, True, _products), (Kind.CONVOLUTION, True, _convolutions))
    for kind, known, rule in (*rules, *((kind, False, _unknown) for kind, _, _ in rules)):
        chosen = (table.kind == kind) & (is_known == known)
        if chosen.any():
            seconds[chosen] = rule(table.part(chosen), rates, parameters)
    for kind, name in _BY_OPERATIONS:
        chosen = (table.kind == kind) & (table.flops > 0)
        if chosen.any():
            part = table.part(chosen)
            busy = part.flops / (_peak(part, rates, parameters) * parameters[name])
            seconds[chosen] = np.maximum(busy, seconds[chosen])
    return seconds + parameters["kernel_seconds"]


def _memory_seconds(moved: Numbers, rates: Rates, parameters: Parameters, share: Numbers | float) -> Numbers:
    """Of `moved` bytes, a part of which are still in the second-level cache."""
    cached = np.minimum(1.0, parameters["cache_part"] * rates.cache_bytes / np.maximum(moved, 1.0))
    return moved / (rates.bandwidth * share) * (1 - cached * (1 - 1 / parameters["cache_speed"]))


# Kinds whose kernels are known by their operations alone.
_BY_OPERATIONS = (
    (Kind.ATTENTION, "attention"),
    (Kind.ATTENTION_BACKWARD, "attention_backward"),
    (Kind.RECURRENT, "recurrent"),
)
_SHARES = {
    Kind.ELEMENTWISE: "elementwise",
    Kind.COPY: "elementwise",
    Kind.UPDATE: "elementwise",
    Kind.REDUCTION: "reduction",
    Kind.NORM: "norm",
    Kind.NORM_BACKWARD: "norm_backward",
    Kind.BATCH_NORM: "elementwise",
    Kind.BATCH_NORM_BACKWARD: "batch_norm_backward",
    Kind.SOFTMAX: "softmax",
    Kind.WINDOW: "window",
    Kind.INDEXING: "indexing",
}


def _moving(table: Table, rates: Rates, parameters: Parameters) -> Numbers:
    """As if every operator only moved its data."""
    shares = np.array([parameters[_SHARES.get(kind, "elementwise")] for kind in Kind])
    share = shares[table.kind]
    sizes = table.moving_sizes
    permuted = (sizes.is_permuted > 0) & (table.kind != Kind.PRODUCT) & (table.kind != Kind.CONVOLUTION)
    share = np.where(permuted, share * parameters["permuted"], share)
    # Statistics are taken in one pass over the input, and used in another.
    statistics = (table.kind == Kind.BATCH_NORM) & (table.phase >= 0) & (sizes.takes_statistics > 0)
    share = np.where(statistics, parameters["batch_norm"], share)
    return _memory_seconds(table.moved, rates, parameters, share)


def _peak(table: Table, rates: Rates, p: Parameters) -> Numbers:
    """Operations per second that the units can do; the faster tensor cores are, the harder it is to keep them busy."""
    plain = rates.flops.get("float32", 1e12)
    peaks = []
    for name in DTYPES:
        peak = rates.flops.get(name, plain / 32 if name == "float64" else plain)
        fast = peak / (_USUAL_RATIO * plain)
        peaks.append(peak * min(1.0, fast ** -p["feeding"]))
    # PyTorch lets convolutions, not matrix products, use TF32.
    tf32 = np.where((table.kind == Kind.CONVOLUTION) & (table.dtype < 2), rates.flops.get("tf32", plain), 0.0)
    fastest: Numbers = np.maximum(np.array(peaks)[table.dtype], tf32)
    return fastest


def _longer(first: Numbers, second: Numbers, parameters: Parameters) -> Numbers:
    """The longer of two times that overlap, but not perfectly."""
    power = parameters["overlap"]
    most = np.maximum(np.maximum(first, second), 1e-12)
    return most * ((first / most) ** power + (second / most) ** power) ** (1 / power)


def tiled(
    batch: Numbers, rows: Numbers, columns: Numbers, summed: Numbers, rate: Numbers, rates: Rates, p: Parameters
) -> Numbers:
    """Seconds of products of matrices, computed by the best of several tiles."""
    best = np.full(len(rows), np.inf)
    per_multiprocessor = rate / rates.multiprocessors
    wide = summed + p["prologue"]
    for height, width, power in _TILES:
        tiles = batch * np.ceil(rows / height) * np.ceil(columns / width)
        each = 2.0 * height * width / (per_multiprocessor * p["tile"] ** power)
        for split in _SPLITS:
            waves = np.ceil(tiles * split / rates.multiprocessors)
            spent = waves * each * (wide if split == 1 else np.ceil(summed / split) + p["prologue"])
            if split > 1:
                # Parts are added up in float32.
                spent = spent + 8.0 * split * batch * rows * columns / (rates.bandwidth * p["cache_speed"])
            best = np.minimum(best, spent)
    return best


def _unknown(table: Table, rates: Rates, p: Parameters) -> Numbers:
    """Of products whose sizes are not known."""
    busy = table.flops / (_peak(table, rates, p) * p["product"])
    return np.maximum(busy, _memory_seconds(table.moved, rates, p, p["product_memory"]))


def _products(table: Table, rates: Rates, p: Parameters) -> Numbers:
    batch, rows, columns, summed = table.product_sizes
    aligned = (columns % _ALIGNMENT == 0) & (summed % _ALIGNMENT == 0)
    rate = _peak(table, rates, p) * p["product"] * np.where(aligned | (table.dtype < 2), 1.0, p["unaligned"])
    busy = tiled(batch, rows, columns, summed, rate, rates, p)
    return _longer(busy, _memory_seconds(table.moved, rates, p, p["product_memory"]), p)


def _convolutions(table: Table, rates: Rates, p: Parameters) -> Numbers:
    """All directions that an operator computes: forward, or gradients of input, weights and bias."""
    gradients = table.convolution_sizes.gradients.astype(np.int64)
    total = np.zeros(len(table))
    for direction in (FORWARD, INPUT, WEIGHT):
        chosen = gradients == 0 if direction == FORWARD else (gradients & direction) > 0
        if chosen.any():
            total[chosen] += _convolution(table.part(chosen), direction, rates, p)
    bias = (gradients & 4) > 0
    if bias.any():
        part = table.part(bias)
        sizes, width = part.convolution_sizes, np.where(part.dtype >= 2, 2.0, 4.0)
        summed = sizes.images * sizes.outputs * sizes.output_pixels * width
        total[bias] += _memory_seconds(summed, rates, p, p["reduction"])
    return total


_NAMES = {FORWARD: "forward", INPUT: "input", WEIGHT: "weight"}


def _convolution(table: Table, direction: int, rates: Rates, p: Parameters) -> Numbers:
    images, inputs, outputs, groups, pixels, out_pixels, taps, last, _ = table.convolution_sizes
    is_narrow = table.dtype >= 2
    width = np.where(is_narrow, 2.0, 4.0)
    name = _NAMES[direction]
    size_in, size_out = images * inputs * pixels * width, images * outputs * out_pixels * width
    weights = outputs * inputs / groups * taps * width
    moved = size_in + size_out + weights
    # Whole products: groups that aren't depthwise are padded to what tensor cores take.
    each_in, each_out = inputs / groups, outputs / groups
    least = np.where(is_narrow & (groups > 1), p["group_width"], 1.0)
    each_in, each_out = np.maximum(each_in, least), np.maximum(each_out, least)
    padded = np.where(is_narrow, np.ceil(each_in / _ALIGNMENT) * _ALIGNMENT, each_in)
    shape = {
        FORWARD: (images * out_pixels, each_out, padded * taps),
        INPUT: (images * pixels, each_in, each_out * taps * out_pixels / np.maximum(pixels, 1)),
        WEIGHT: (each_out, padded * taps, images * out_pixels),
    }[direction]
    rate = _peak(table, rates, p) * p[f"convolution_{name}"]
    layout = np.where(last > 0, 1.0, p[f"channels_first_{name}"])
    grouped = groups > 1
    rate = rate * np.where(grouped, p[f"grouped_first_{name}"], layout)
    busy = tiled(groups, *shape, rate, rates, p)
    # Kernels for groups with channels last compute every group by itself, on the plain units.
    plain = rates.flops.get("float32", 1e12)
    products = images * outputs * out_pixels * taps * inputs / groups
    busy = np.where(grouped & (last > 0), 2 * products / (plain * p[f"grouped_{name}"]), busy)
    # Tensor cores want channels last: input and output are turned over where they aren't.
    turned = np.where(is_narrow & (last == 0), p["turned"], 0.0)
    share = np.where(table.compiled, p["convolution_memory_compiled"], p["convolution_memory"])
    memory = _memory_seconds(moved, rates, p, share)
    turning = _memory_seconds(2 * (size_in + size_out) * turned, rates, p, p["elementwise"])
    dense = _longer(busy, memory, p) + turning
    is_depthwise = grouped & (inputs == groups)
    if not is_depthwise.any():
        return dense
    # Depthwise convolutions run on the plain units.
    slow = np.where(last > 0, p[f"depthwise_{name}"], p[f"depthwise_first_{name}"])
    share = np.where(last > 0, p["depthwise_memory"], p["depthwise_first_memory"])
    share = np.where(table.compiled, p["depthwise_memory_compiled"], share)
    single = _longer(2 * products / (plain * slow), _memory_seconds(moved, rates, p, share), p)
    return np.where(is_depthwise, single, dense)

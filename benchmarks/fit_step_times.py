"""Fits the parameters of the time model, and writes the packaged file (src/memfit/timing/parameters.json).

    python -m benchmarks.fit_step_times [--csv PATH] [--tables FILE [--kept]] [--rounds N] [--share S] [--only NAMES]

Only rows of the families in the fitted half are read (`benchmarks.step_times.half_of`). Each parameter is a physical
quantity with a guess from documents or experience and a bound (`GUESSES`, `LIMITS`); a robust least-squares fit of the
logarithms of times moves it, and is held back by its distance from the guess. Rows of large families count less, so
that no family decides alone; training counts as much as inference.

The interval comes from the same rows: the families of the half are divided in two again, parameters are fitted to each
part, and the errors on the other part are what the interval has to cover.

`--tables` keeps the traced operators in a file, so that the next fit needs no trace; with `--kept`, rows that aren't in
it are left out. `--only` fits some parameters; all else stays as it is.
"""

import argparse
import hashlib
import json
import pickle
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks import rows
from benchmarks.reporting import ROOT
from benchmarks.step_times import DEFAULT_CSV, FITTED, family_of, half_of, operators, subject_of, table_key
from memfit.catalogue import find_device
from memfit.timing.rates import Rates, rates_of
from memfit.timing.step import launch_seconds, operator_seconds, queued
from memfit.timing.table import Table, between, table_of

TARGET = ROOT / "src" / "memfit" / "timing" / "parameters.json"
REFERENCE = "rtx-3090"
# An error of this size counts once; a parameter that is e times its guess counts as much as so many of them.
_ERROR = 0.08
_HELD_BACK = 1.5

GUESSES = {
    # Kernels and the cache.
    "kernel_seconds": 2e-6,
    "cache_part": 0.3,
    "cache_speed": 3.0,
    # Shares of bandwidth.
    "elementwise": 0.85,
    "reduction": 0.7,
    "norm": 0.6,
    "norm_backward": 0.5,
    "batch_norm": 0.6,
    "batch_norm_backward": 0.55,
    "softmax": 0.8,
    "window": 0.7,
    "indexing": 0.5,
    "permuted": 0.6,
    # Products: shares of the peak, smaller tiles, what a tile costs beside its products, odd sizes.
    "overlap": 3.0,
    "prologue": 64.0,
    "tile": 0.8,
    "product": 0.75,
    "product_memory": 0.8,
    "unaligned": 0.4,
    "attention": 0.5,
    "attention_backward": 0.35,
    # Convolutions by direction, and of them those with channels first.
    "convolution_forward": 0.75,
    "convolution_input": 0.65,
    "convolution_weight": 0.6,
    "channels_first_forward": 1.0,
    "channels_first_input": 1.0,
    "channels_first_weight": 1.0,
    "turned": 0.7,
    "convolution_memory": 0.75,
    "group_width": 16.0,
    "grouped_forward": 0.3,
    "grouped_input": 0.2,
    "grouped_weight": 0.2,
    "grouped_first_forward": 0.4,
    "grouped_first_input": 0.3,
    "grouped_first_weight": 0.3,
    "depthwise_forward": 0.1,
    "depthwise_input": 0.1,
    "depthwise_weight": 0.05,
    "depthwise_first_forward": 0.15,
    "depthwise_first_input": 0.15,
    "depthwise_first_weight": 0.05,
    "depthwise_memory": 0.7,
    "depthwise_first_memory": 0.6,
    # Of convolutions in compiled graphs, whose tensors Inductor lays out for them.
    "convolution_memory_compiled": 0.75,
    "depthwise_memory_compiled": 0.7,
    # The processor, for each operator.
    "launch_forward": 8e-6,
    "launch_backward": 8e-6,
    "launch_optimizer": 6e-6,
    "launch_compiled": 4e-6,
}
# Not fitted: published rates of large products on A100 and H100 (312 and 989 TFLOP/s nominal, 250 and 680 reached), and
# recurrent layers, of which there is one family.
ASSUMED = {"feeding": 0.15, "recurrent": 0.25}
_SHARES = """
elementwise reduction norm norm_backward batch_norm batch_norm_backward softmax window permuted product_memory
convolution_memory depthwise_memory depthwise_first_memory depthwise_memory_compiled
""".split()  # noqa: SIM905
LIMITS = {
    **dict.fromkeys(_SHARES, 0.95),
    **{name: 1.0 for name in GUESSES if name.startswith(("channels_first_", "grouped_", "attention", "convolution_"))},
    "convolution_memory": 0.95,
    "convolution_memory_compiled": 0.95,
    "cache_speed": 6.0,
    "kernel_seconds": 5e-6,
    "turned": 1.5,
    "product": 1.05,
    "tile": 1.0,
}
FLOPS, BANDWIDTH = "flops {}", "bandwidth {}"

Parameters = dict[str, float]
Numbers = NDArray[np.float64]
Tables = dict[tuple[Any, ...], Table]


def traced(population: Sequence[rows.Row], path: Path | None) -> Tables:
    """The operators of every row; from the file where they are there."""
    known: Tables = {}
    if path is not None and path.exists():
        known = pickle.loads(path.read_bytes())
    missing: dict[Any, list[rows.Row]] = defaultdict(list)
    for row in population:
        if table_key(row) not in known:
            missing[subject_of(row)].append(row)
    for some in missing.values():
        try:
            work_at = operators(some)
        except Exception as error:  # a model that the installed library lacks, or can't build
            print(f"skipped {some[0]['model']}: {str(error).splitlines()[0]}", flush=True)
            continue
        for row in some:
            work, at = work_at(int(row["batch"]))
            table = table_of(work)
            if at is not None:
                size, own, (other, others) = at
                table = between((own, table), (other, table_of(others)), size)
            known[table_key(row)] = table
    if path is not None and missing:
        path.write_bytes(pickle.dumps(known))
    return known


@dataclass(slots=True)
class _Group:
    """Rows of one GPU: distinct operators, and which of them each row runs."""

    rates: Rates
    gpu: str
    indices: list[int]
    distinct: Table
    of_row: list[NDArray[np.int64]]


class Rows:
    """Measured rows whose times can be computed again and again with other parameters."""

    def __init__(self, chosen: Sequence[rows.Row], tables: Tables) -> None:
        self.rows = [row for row in chosen if table_key(row) in tables]
        self.measured = np.array([float(row["step_ms"]) / 1e3 for row in self.rows])
        self._groups = []
        for gpu in sorted({row["gpu"] for row in self.rows}):
            indices = [i for i, row in enumerate(self.rows) if row["gpu"] == gpu]
            made = [tables[table_key(self.rows[i])] for i in indices]
            matrix = np.concatenate([_matrix(table) for table in made])
            distinct, inverse = np.unique(matrix, axis=0, return_inverse=True)
            ends = np.cumsum([len(table) for table in made])
            of_row = np.split(inverse.ravel(), ends[:-1])
            self._groups.append(_Group(_nominal(gpu), gpu, indices, _table(distinct), of_row))

    @property
    def weights(self) -> Numbers:
        """What rows count: less those of large families, training as much as inference."""
        families = Counter(family_of(row["model"]) for row in self.rows)
        weights = np.array([families[family_of(row["model"])] ** -0.25 for row in self.rows])
        for mode in ("training", "inference"):
            chosen = np.array([row["mode"] == mode for row in self.rows])
            weights[chosen] /= np.sqrt((weights[chosen] ** 2).sum()) if chosen.any() else 1.0
        scaled: Numbers = weights * np.sqrt(len(weights) / 2)
        return scaled

    def predict(self, parameters: Mapping[str, float]) -> Numbers:
        """Seconds of every row."""
        found = np.zeros(len(self.rows))
        for group in self._groups:
            rates = sustained(group.rates, group.gpu, parameters)
            kernels = operator_seconds(group.distinct, rates, parameters)
            launches = launch_seconds(group.distinct, rates, parameters)
            for index, chosen in zip(group.indices, group.of_row, strict=True):
                found[index] = queued(kernels[chosen], launches[chosen])
        return found


def _matrix(table: Table) -> Numbers:
    return np.column_stack(
        [table.kind, table.phase, table.dtype, table.compiled, table.flops, table.moved, table.sizes]
    )


def _table(matrix: Numbers) -> Table:
    kind, phase, dtype = (matrix[:, column].astype(np.int64) for column in range(3))
    return Table(kind, phase, dtype, matrix[:, 4], matrix[:, 5], matrix[:, 6:], matrix[:, 3] > 0)


def _nominal(gpu: str) -> Rates:
    """The catalogue's rates, without what was found out before."""
    device = find_device(gpu)
    return replace(rates_of(device), flops=device.flops, bandwidth=device.bandwidth_bytes_per_second or 0.0)


def sustained(rates: Rates, gpu: str, parameters: Mapping[str, float]) -> Rates:
    """The rates that a device sustains with these parameters."""
    flops, bandwidth = parameters.get(FLOPS.format(gpu), 1.0), parameters.get(BANDWIDTH.format(gpu), 1.0)
    return replace(
        rates, flops={name: rate * flops for name, rate in rates.flops.items()}, bandwidth=rates.bandwidth * bandwidth
    )


def fit(measured: Rows, start: Parameters, num_rounds: int, only: Sequence[str] = ()) -> Parameters:
    """Parameters that explain the rows best; where `only` some are fitted, the others are those of the start."""
    gpus = sorted({row["gpu"] for row in measured.rows} - {REFERENCE})
    guesses = GUESSES | {form.format(gpu): 1.0 for gpu in gpus for form in (FLOPS, BANDWIDTH)}
    names, weights = list(only or guesses), measured.weights
    others = ASSUMED | (dict(start) if only else {})
    guess = np.log([guesses[name] for name in names])
    highest = np.log([LIMITS.get(name, np.inf) for name in names])
    first = np.minimum(np.log([start.get(name, guesses[name]) for name in names]), highest - 1e-3)

    def made(step: Numbers) -> Parameters:
        return others | dict(zip(names, map(float, np.exp(first + step)), strict=True))

    def distances(step: Numbers) -> Numbers:
        errors = np.log(measured.predict(made(step)) / measured.measured)
        return np.concatenate([errors / _ERROR * weights, (first + step - guess) * _HELD_BACK])

    bounds = (np.full(len(names), -6.0), np.minimum(highest - first, 6.0))
    result = least_squares(
        distances, np.zeros(len(names)), loss="soft_l1", max_nfev=num_rounds, diff_step=1e-4, bounds=bounds
    )
    return made(result.x)


def part_of(model: str) -> int:
    """The part of the half that a family belongs to, for the interval."""
    return hashlib.sha256(family_of(model).encode()).digest()[1] % 2


def spreads(
    chosen: Sequence[rows.Row], tables: Tables, start: Parameters, num_rounds: int, only: Sequence[str] = ()
) -> dict[str, list[float]]:
    """Percentiles of measured over predicted time, in logarithms, of each kind of step, on families not fitted to."""
    errors: dict[str, list[float]] = defaultdict(list)
    for part in (0, 1):
        known = Rows([row for row in chosen if part_of(row["model"]) == part], tables)
        other = Rows([row for row in chosen if part_of(row["model"]) != part], tables)
        predicted = other.predict(fit(known, start, num_rounds))
        for row, seconds, true in zip(other.rows, predicted, other.measured, strict=True):
            errors["compiled" if row["compiled"] == "1" else row["mode"]].append(float(np.log(true / seconds)))
    return {
        kind: [round(float(value), 4) for value in np.percentile(some, [2.5, 97.5])] for kind, some in errors.items()
    }


def _is_kept(row: rows.Row, share: float) -> bool:
    conditions = repr((*table_key(row), row["gpu"], row["compiled"]))
    return hashlib.sha256(conditions.encode()).digest()[0] < 256 * share


def main() -> None:
    """Fit and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=DEFAULT_CSV, help="measured rows")
    parser.add_argument("--tables", type=Path, help="file that keeps the traced operators")
    parser.add_argument("--rounds", type=int, default=12, help="steps of the fit")
    parser.add_argument("--kept", action="store_true", help="leave out rows whose operators the file hasn't")
    parser.add_argument("--only", default="", metavar="NAMES", help="parameters to fit, with commas; default: all")
    parser.add_argument("--share", type=float, default=1.0, help="of the rows of inference, chosen by a hash")
    options = parser.parse_args()
    chosen = [
        row
        for row in rows.read_rows(options.csv)
        if half_of(row["model"]) == FITTED and (row["mode"] == "training" or _is_kept(row, options.share))
    ]
    tables = pickle.loads(options.tables.read_bytes()) if options.kept else traced(chosen, options.tables)
    only = [name for name in options.only.split(",") if name]
    before: Parameters = {}
    known: dict[str, Any] = {}
    if TARGET.exists():
        known = json.loads(TARGET.read_text(encoding="utf-8"))
        before = known["parameters"]
        for gpu, (flops, bandwidth) in known["sustained"].items():
            before |= {FLOPS.format(gpu): flops, BANDWIDTH.format(gpu): bandwidth}
    measured = Rows(chosen, tables)
    found = fit(measured, before, options.rounds, only)
    gpus = sorted({row["gpu"] for row in measured.rows})
    content = {
        "fitted": f"{date.today()}, {len(measured.rows)} rows of the fitted half of {options.csv.name}",
        "parameters": {name: float(f"{found[name]:.4g}") for name in (*GUESSES, *ASSUMED)},
        "sustained": {
            gpu: [round(found[form.format(gpu)], 3) for form in (FLOPS, BANDWIDTH)] for gpu in gpus if gpu != REFERENCE
        },
        "spreads": known["spreads"] if only else spreads(chosen, tables, found, max(4, options.rounds // 2)),
        "devices": gpus,
    }
    if only:
        note = f"{known['fitted']}; {', '.join(only)}: {content['fitted']}"
        content |= {"fitted": note, "sustained": known["sustained"], "devices": known["devices"]}
    TARGET.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    errors = np.abs(measured.predict(found) / measured.measured - 1)
    print(f"{len(measured.rows)} rows, median error {np.median(errors):.1%}: {TARGET}")


if __name__ == "__main__":
    main()

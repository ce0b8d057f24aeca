"""Which modules to compute again, or whose activations to move to the host: an integer programme.

For every module there is a 0/1 variable "computed again" (and one "waits on the host"), with the seconds it costs. Of
two modules of which one contains the other at most one is chosen. At each moment of forward and backward pass, what is
alive less what the chosen modules keep away must stay within the limit. All of that is linear, so an integer programme
finds the cheapest choice, and proves it (Checkmate and its kin solve the same for single operators; modules are what
users can wrap). Only few moments bind: the programme starts without any, and each solution's highest moments are added
until none is above the limit. HiGHS solves each in milliseconds; with one thread, a fixed seed and no limit of time,
the same question has the same answer.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray

from memfit.core.settings import Settings
from memfit.planner.memory import Bytes, Intervals, StepMemory, UnitMemory, held_segments, overlap
from memfit.planner.speed import StepSpeed

_MAX_UNITS = 500
# A module that keeps away less than this share of the limit is not worth a variable.
_MIN_SHARE = 0.0005
_MAX_ROUNDS = 60
_MOMENTS_PER_ROUND = 8
_MAX_NODES = 3000
_GAP = 0.002
_MIB = 1024.0**2
# Keeps equal moves apart, so that the first of equal blocks is taken and the solver has no symmetry to explore.
_TIE = 1e-5


@dataclass(frozen=True, slots=True)
class _ModuleMove:
    """One variable: a unit that is computed again, waits on the host, or both."""

    path: str
    recomputed: bool
    offloaded: bool
    seconds: float


class ModuleMoves:
    """What can be chosen at one micro-batch size, with what each choice keeps away at every moment."""

    def __init__(
        self, memory: StepMemory, speed: StepSpeed, micro: int | None, *, recompute: bool = True, offload: bool = False
    ) -> None:
        sizes = memory.sizes(micro)
        found: list[tuple[float, _ModuleMove, Bytes]] = []
        highest = float(sizes.sum())

        def add(unit: UnitMemory, away: Intervals, *, again: bool, hosted: float) -> None:
            saved = memory.savings(away, micro, unit if again else None)
            total = float(saved.max(initial=0.0))
            if total >= _MIN_SHARE * highest:
                seconds = (speed.recomputation(unit.path, micro) if again else 0.0) + speed.offload(hosted)
                found.append((total, _ModuleMove(unit.path, again, hosted > 0, seconds), saved))

        for unit in memory.units:
            hosted, inputs = (float(sizes[i.block].sum()) for i in (unit.hosted, unit.inputs_hosted))
            if recompute:
                add(unit, unit.away, again=True, hosted=0.0)
            if offload and hosted:
                add(unit, unit.hosted, again=False, hosted=hosted)
            if offload and recompute and inputs:
                both = map(np.concatenate, zip(unit.away, unit.inputs_hosted, strict=True))
                add(unit, Intervals(*both), again=True, hosted=inputs)
        order = sorted(range(len(found)), key=lambda index: (-found[index][0], index))[:_MAX_UNITS]
        kept = [found[index] for index in sorted(order)]
        self.all = tuple(choice for _, choice, _ in kept)
        self.pairs, lost = self._pairs(memory, micro, highest)
        self.holders, held = self._held(memory, micro, highest)
        rows = [*(saved for _, _, saved in kept), *lost, *held]
        self.savings = np.array(rows).reshape(len(rows), len(memory.moments))
        # Of variables of moves, of pairs and of what is held together.
        self.seconds = np.array([choice.seconds for choice in self.all] + [0.0] * (len(self.pairs) + len(self.holders)))
        self.num_columns = len(self.seconds)

    def _pairs(
        self, memory: StepMemory, micro: int | None, highest: float
    ) -> tuple[list[tuple[int, int]], list[Bytes]]:
        """Pairs of moves that save less together than apart, and by how much at each moment, negative."""
        units = {unit.path: unit for unit in memory.units}
        again = [(index, units[one.path]) for index, one in enumerate(self.all) if one.recomputed]
        keepers: dict[int, list[tuple[int, UnitMemory]]] = {}
        for index, unit in again:
            for block in set(unit.kept.block.tolist()):
                keepers.setdefault(block, []).append((index, unit))
        pairs: list[tuple[int, int]] = []
        lost: list[Bytes] = []
        for index, unit in again:
            others = {at: other for block in unit.away.block.tolist() for at, other in keepers.get(block, ())}
            for at, other in sorted(others.items(), key=lambda pair: pair[0]):
                if other.path == unit.path or other.path.startswith(f"{unit.path}."):
                    continue
                common = memory.savings(overlap(unit, other), micro)
                if float(common.max(initial=0.0)) >= _MIN_SHARE * highest:
                    pairs.append((index, at))
                    lost.append(-common)
        return pairs, lost

    def _held(self, memory: StepMemory, micro: int | None, highest: float) -> tuple[list[list[int]], list[Bytes]]:
        """ModuleMoves of which any one makes blocks live longer, and how much at each moment, negative."""
        units = {unit.path: unit for unit in memory.units}
        again = [(index, units[one.path]) for index, one in enumerate(self.all) if one.recomputed and not one.offloaded]
        holders: list[list[int]] = []
        rows: list[Bytes] = []
        for places, intervals in held_segments([unit for _, unit in again]):
            held = memory.savings(intervals, micro)
            if float(held.max(initial=0.0)) >= _MIN_SHARE * highest:
                holders.append([again[place][0] for place in places])
                rows.append(-held)
        return holders, rows


class Selection:
    """The programme of one step at one micro-batch size."""

    def __init__(self, memory: StepMemory, moves: ModuleMoves, settings: Settings, batch_size: int | None) -> None:
        self._moves = moves
        self._settings = replace(settings, checkpoint=(), offload=())
        self._plain = memory.curve(self._settings, batch_size)[memory.moments]
        # What the optimizer's update needs, whatever is chosen.
        self._floor_bytes = memory.update_bytes(self._settings, batch_size)
        self._bounds: dict[float, tuple[float, frozenset[int]]] = {}

    def bound(self, limit_bytes: float) -> float:
        """Seconds that any choice within the limit adds to a micro-batch, at least; infinite when none is within."""
        if self._floor_bytes > limit_bytes:
            return float("inf")
        if float(self._plain.max(initial=0.0)) <= limit_bytes:
            return 0.0
        return self._relaxed(limit_bytes)[0]

    def cheapest(self, limit_bytes: float) -> Settings | None:
        """The settings with the least time that stay within the limit; None when no choice does."""
        if self.bound(limit_bytes) == float("inf"):
            return None
        if float(self._plain.max(initial=0.0)) <= limit_bytes:
            return self._settings
        values, _ = self._solve(limit_bytes, known=self._relaxed(limit_bytes)[1])
        return None if values is None else self._with(values)

    def smallest(self) -> Settings:
        """The settings that need least memory."""
        values, _ = self._solve(None)
        return self._settings if values is None else self._with(values)

    def _relaxed(self, limit_bytes: float) -> tuple[float, frozenset[int]]:
        """(least seconds where modules may be chosen in part, the moments that bind); a linear programme."""
        if limit_bytes not in self._bounds:
            values, moments = self._solve(limit_bytes, whole=False)
            seconds = float("inf") if values is None else float(values @ self._moves.seconds)
            self._bounds[limit_bytes] = (seconds, moments)
        return self._bounds[limit_bytes]

    def _solve(
        self, limit_bytes: float | None, *, whole: bool = True, known: frozenset[int] = frozenset()
    ) -> tuple[NDArray[np.float64] | None, frozenset[int]]:
        """(values of the variables, None when nothing is within the limit; the moments that bind)."""
        if whole and not self._moves.all:
            return None, known
        model = self._programme(limit_bytes, whole=whole)
        moments: set[int] = set()
        values = None if whole else np.zeros(self._moves.num_columns)
        curve = self._plain
        for _ in range(_MAX_ROUNDS):
            fresh = sorted({*_highest(curve, limit_bytes), *known} - moments)
            if not fresh:
                break
            moments.update(fresh)
            for moment in fresh:
                self._add_moment(model, moment, limit_bytes)
            model.run()
            lost = (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)
            solution = model.getSolution().col_value
            if model.getModelStatus() in lost or not model.getInfo().primal_solution_status or not solution:
                return None, frozenset(moments)
            values = np.array(solution[: self._moves.num_columns])
            values = np.round(values) if whole else values
            # What is alive at each moment when so much of each variable is chosen.
            curve = self._plain - values @ self._moves.savings
            if whole and limit_bytes is not None and float(curve.max(initial=0.0)) <= limit_bytes:
                return values, frozenset(moments)
        else:
            if whole and limit_bytes is not None:
                return None, frozenset(moments)
        return values, frozenset(moments)

    def _with(self, values: NDArray[np.float64]) -> Settings:
        picked = [one for one, value in zip(self._moves.all, values, strict=False) if value]
        return replace(
            self._settings,
            checkpoint=tuple(one.path for one in picked if one.recomputed),
            offload=tuple(one.path for one in picked if one.offloaded),
        )

    def _programme(self, limit_bytes: float | None, *, whole: bool = True) -> Any:
        model = highspy.Highs()
        limits = {"mip_rel_gap": _GAP, "mip_max_nodes": _MAX_NODES}
        for name, value in {"output_flag": False, "threads": 1, "random_seed": 0, **limits}.items():
            model.setOptionValue(name, value)
        scale = max((one.seconds for one in self._moves.all), default=1.0) or 1.0
        minimise_peak = limit_bytes is None
        for index, one in enumerate(self._moves.all):
            cost = one.seconds / scale + _TIE * (1 + index / len(self._moves.all))
            model.addVar(0.0, 1.0)
            model.changeColCost(index, 1e-3 * cost if minimise_peak else cost)
            if whole:
                model.changeColIntegrality(index, highspy.HighsVarType.kInteger)
        for _ in range(len(self._moves.pairs) + len(self._moves.holders)):
            model.addVar(0.0, 1.0)
        if minimise_peak:
            model.addVar(0.0, highspy.kHighsInf)
            model.changeColCost(self._moves.num_columns, 1.0)
        for index, pair in enumerate(self._moves.pairs, len(self._moves.all)):
            # 1 where both are chosen, else 0: nobody wants it larger than it must be.
            columns, weights = np.array([*pair, index], dtype=np.int32), np.array([1.0, 1.0, -1.0])
            model.addRow(-highspy.kHighsInf, 1.0, 3, columns, weights)
        first = len(self._moves.all) + len(self._moves.pairs)
        for index, group in enumerate(self._moves.holders, first):
            for holder in group:
                # 1 where any of them is chosen.
                columns, weights = np.array([holder, index], dtype=np.int32), np.array([1.0, -1.0])
                model.addRow(-highspy.kHighsInf, 0.0, 2, columns, weights)
        for group in self._exclusive():
            model.addRow(0.0, 1.0, len(group), np.array(group, dtype=np.int32), np.ones(len(group)))
        return model

    def _exclusive(self) -> list[list[int]]:
        """Variables of which at most one may be 1: those of each innermost unit and of all that contain it."""
        by_path: dict[str, list[int]] = {}
        for index, one in enumerate(self._moves.all):
            by_path.setdefault(one.path, []).append(index)
        paths = sorted(by_path)
        inner = [p for i, p in enumerate(paths) if i + 1 == len(paths) or not paths[i + 1].startswith(p + ".")]
        groups = []
        for path in inner:
            names = path.split(".")
            chain = [part for end in range(len(names)) if (part := ".".join(names[: end + 1])) in by_path]
            group = [index for part in chain for index in by_path[part]]
            if len(group) > 1:
                groups.append(group)
        return groups

    def _add_moment(self, model: Any, moment: int, limit_bytes: float | None) -> None:
        """What is alive, less what is kept away, is at most the limit (or the peak that is minimised)."""
        column = self._moves.savings[:, moment] / _MIB
        used = np.flatnonzero(column)
        indices, values = used.astype(np.int32), column[used]
        if limit_bytes is None:
            indices = np.append(indices, np.int32(self._moves.num_columns))
            values = np.append(values, 1.0)
            least = float(self._plain[moment]) / _MIB
        else:
            least = (float(self._plain[moment]) - limit_bytes) / _MIB
        model.addRow(least, highspy.kHighsInf, len(indices), indices, values)


def _highest(curve: Bytes, limit_bytes: float | None) -> list[int]:
    """The highest tick of each of a few stretches of the curve, if above the limit."""
    if not len(curve):
        return []
    edges = np.linspace(0, len(curve), _MOMENTS_PER_ROUND + 1).astype(int)
    highest = float(curve.max())
    least = 0.98 * highest if limit_bytes is None else limit_bytes
    found = []
    for first, last in pairwise(edges):
        if last > first:
            tick = int(first + curve[first:last].argmax())
            if curve[tick] > least or (limit_bytes is None and curve[tick] >= highest):
                found.append(tick)
    return found

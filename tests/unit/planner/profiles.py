"""Profiles of made-up steps: chains of blocks, each with two layers that keep something for the backward pass."""

from dataclasses import replace

from memfit.core.device import Kind
from memfit.core.profile import Call, Drop, Profile, Unit, Work
from memfit.core.timeline import Block, Category, Mark, Phase, Timeline
from memfit.core.units import MIB
from memfit.planner.speed import StepSpeed
from memfit.timing import Rates


class Chain:
    """A chain of blocks "layers.0" ...; each has layers "a" and "b", which keep `kept` bytes inside of each.

    Args:
        kept: bytes that each layer keeps, in MiB for one sample, by block.
        output: bytes of each layer's output, in MiB for one sample.
        parameter: bytes of each block's parameter, in MiB.
        flops: operations of each layer for one sample.
    """

    def __init__(self, kept, output=1, parameter=1, flops=None, state=2):
        self.kept, self.output, self.parameter, self.state = kept, output, parameter, state
        self.flops = flops or [10**9] * len(kept)

    def profile(self, batch_size=4, features=("fusable",)):
        self.tick, self.open, self.blocks, self.work = 0, {}, [], []
        marks = [Mark(0, Phase.SETUP, 0)]
        count = len(self.kept)
        for i in range(count):
            self.start(f"p{i}", self.parameter, Category.PARAMETER, Phase.SETUP, f"layers.{i}.a")
        self.start("batch", batch_size, Category.BATCH, Phase.SETUP, "")
        spans = {}
        for step in (1, 2):
            marks.append(Mark(self.tick, Phase.FORWARD, step))
            for i in range(count):
                for layer in "ab":
                    path = f"layers.{i}.{layer}"
                    first, first_work = self.tick, len(self.work)
                    self.start(f"kept{i}{layer}", self.kept[i] * batch_size, Category.ACTIVATION, Phase.FORWARD, path)
                    self.start(f"out{i}{layer}", self.output * batch_size, Category.ACTIVATION, Phase.FORWARD, path)
                    if step == 1:
                        self.add_work(path, Phase.FORWARD, self.flops[i] * batch_size)
                        spans[path] = [(first, self.tick), (first_work, len(self.work))]
            marks.append(Mark(self.tick, Phase.BACKWARD, step))
            for i in reversed(range(count)):
                for layer in "ba":
                    path = f"layers.{i}.{layer}"
                    begin = self.tick
                    self.start("gradient of output", self.output * batch_size, Category.TEMPORARY, Phase.BACKWARD, path)
                    if layer == "a":
                        self.start(f"g{i}", self.parameter, Category.GRADIENT, Phase.BACKWARD, path)
                    self.stop(f"kept{i}{layer}")
                    self.stop(f"out{i}{layer}")
                    self.stop("gradient of output")
                    if step == 1:
                        self.add_work(path, Phase.BACKWARD, 2 * self.flops[i] * batch_size)
                        spans[path].append((begin, self.tick))
            marks.append(Mark(self.tick, Phase.OPTIMIZER, step))
            for i in range(count):
                if step == 1:
                    self.start(f"s{i}", self.state, Category.OPTIMIZER_STATE, Phase.OPTIMIZER, f"layers.{i}.a")
            self.start("scratch", self.parameter, Category.TEMPORARY, Phase.OPTIMIZER, "")
            self.stop("scratch")
            self.add_work("", Phase.OPTIMIZER, 0) if step == 1 else None
            for i in range(count):
                self.stop(f"g{i}")
        timeline = Timeline(tuple(self.blocks), self.tick, tuple(marks))
        units = self.units(spans)
        return Profile(
            timeline,
            units,
            tuple(self.work),
            batch_size,
            "SGD",
            frozenset(features),
            count * MIB // 4,
            count * MIB // 4,
        )

    def start(self, name, mebibytes, category, phase, module):
        self.open.setdefault(name, len(self.blocks))
        self.blocks.append(Block(int(mebibytes * MIB), self.tick, None, category, phase, module, name))
        self.open[name] = len(self.blocks) - 1
        self.tick += 1

    def stop(self, name):
        index = self.open.pop(name)
        self.blocks[index] = replace(self.blocks[index], end=self.tick)
        self.tick += 1

    def add_work(self, module, phase, flops):
        self.work.append(Work(module, phase, "aten.mm", int(flops), 1000, "float32"))

    def units(self, spans):
        found = []
        for i in range(len(self.kept)):
            a, b = spans[f"layers.{i}.a"], spans[f"layers.{i}.b"]
            both = [(a[0][0], b[0][1]), (a[1][0], b[1][1]), (b[2][0], a[2][1])]
            found.append(Unit(f"layers.{i}", "Block", (self.call(both, i, "ab"),)))
            found.append(Unit(f"layers.{i}.a", "Layer", (self.call(a, i, "a"),)))
            found.append(Unit(f"layers.{i}.b", "Layer", (self.call(b, i, "b"),)))
        return tuple(found)

    def call(self, spans, i, layers):
        forward, operations, backward = spans
        inside = [
            index
            for index, block in enumerate(self.blocks)
            if forward[0] <= block.start < forward[1] and any(block.op == f"kept{i}{layer}" for layer in layers)
        ]
        # The output of the first layer is what the second is computed from again: it goes with the block.
        if layers == "ab":
            inside += [
                k for k, b in enumerate(self.blocks) if forward[0] <= b.start < forward[1] and b.op == f"out{i}a"
            ]
        drops = tuple(Drop(index, forward[1], backward[0]) for index in inside)
        return Call(forward, backward, drops, drops, 0, operations)

    @staticmethod
    def with_extra(profile, path, extra_bytes):
        """The profile with a module that needs so much for the moment when it is computed again."""
        units = tuple(
            replace(unit, calls=tuple(replace(call, extra_bytes=extra_bytes) for call in unit.calls))
            if unit.path == path
            else unit
            for unit in profile.units
        )
        return replace(profile, units=units)


def speed_of(profile, larger=None, measured=(), updates=None, plain=None):
    """Speed on a device of round numbers: 1 TFLOP/s, 100 GB/s, 10 GB/s to the host."""
    rates = Rates({"float32": 1e12}, 1e11, kind=Kind.HOST, launch_seconds=1e-6, transfer=1e10)
    return StepSpeed(profile, larger, rates, measured, updates, plain)

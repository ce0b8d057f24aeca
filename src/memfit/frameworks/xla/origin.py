"""Where an instruction comes from: the part of the step, the module and the line of the user's code.

Frameworks tell XLA what each operation is called. JAX wraps the names of transformed code, "transpose(jvp(layer1))" for
the backward pass of layer1; TensorFlow puts "gradient_tape" in front of it.
"""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

from memfit.core.timeline import Phase
from memfit.core.user_code import INSTALLED_FOLDERS, PACKAGE_FOLDER
from memfit.frameworks.xla.hlo import Instruction, Module

# Steps of JAX's own transformations, which it names among the scopes.
_OWN_SCOPES = frozenset({
    "while", "body", "cond", "scan", "closed_call", "checkpoint", "rematted_computation", "remat", "remat2", "pjit",
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "core_call", "branch_0_fun", "branch_1_fun",
    "XLA_Args", "XLA_Retvals", "gradient_tape", "StatefulPartitionedCall", "PartitionedCall",
})  # fmt: skip
_WRAPPED = re.compile(r"^(?:jvp|transpose|vmap|checkpoint|remat|linearize|pmap|shard_map)\((.*)\)$")
_NAME = re.compile(r"^[A-Za-z_][\w.\-\[\]]*$")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an instruction comes from; `source` is the innermost line of the user's code."""

    phase: Phase | None  # None where the framework doesn't say
    module: str
    op: str
    source: str
    is_named: bool = True  # the framework said something about it


PhaseOf = Callable[[str], Phase | None]
"""The part of a step that an operation belongs to, from its name; None where the name doesn't say."""


class Origins:
    """Knows the origin of each instruction; `phases` tells parts of a step from names, JAX's by default."""

    def __init__(self, module: Module, phases: PhaseOf | None = None) -> None:
        self._module = module
        self._phase_of = phases or phase_of
        self._known: dict[str, Origin] = {}
        self._sources: dict[tuple[tuple[str, int], ...], str] = {}
        self._roots = sorted(
            (os.path.abspath(path) for path in {*sys.path, os.getcwd()} if path), key=len, reverse=True
        )

    def of(self, instruction: Instruction) -> Origin:
        """Where `instruction` comes from."""
        if instruction.name not in self._known:
            named = instruction
            if not instruction.op_name and "calls" in instruction.called:
                # The last inside of a fused one. Constants don't count unless there is nothing else: XLA shares one,
                # with the name of its first place.
                inside = self._module.computations[instruction.called["calls"]].instructions
                inside = tuple(inner for inner in inside if inner.opcode not in ("parameter", "constant"))
                computed = tuple(inner for inner in inside if inner.opcode != "broadcast")
                named = next((inner for inner in reversed(computed or inside) if inner.op_name), instruction)
            path, primitive = scopes_of(named.op_name)
            is_plain = not primitive or primitive == instruction.opcode
            op = instruction.opcode if is_plain else f"{primitive} ({instruction.opcode})"
            self._known[instruction.name] = Origin(
                self._phase_of(named.op_name), path, op, self._source(named.source), bool(named.op_name)
            )
        return self._known[instruction.name]

    def _source(self, stack: tuple[tuple[str, int], ...]) -> str:
        """The innermost line of the user's code, without the machine's folders."""
        if stack not in self._sources:
            users = (place for place in stack if not place[0].startswith((*INSTALLED_FOLDERS, PACKAGE_FOLDER)))
            path, line = next(users, ("", 0))
            root = next((root for root in self._roots if path.startswith(root + os.sep)), os.path.dirname(path))
            short = path[len(root) :].lstrip(os.sep)
            self._sources[stack] = f"{short}:{line}" if path and not path.startswith("<") else ""
        return self._sources[stack]


def phase_of(op_name: str) -> Phase | None:
    """The part of a step that an operation belongs to, where its name says so.

    >>> phase_of("jit(step)/transpose(jvp(layer1))/dot_general")
    <Phase.BACKWARD: 'backward'>
    """
    if "transpose(" in op_name or "gradient_tape/" in op_name:
        return Phase.BACKWARD
    if "jvp(" in op_name:
        return Phase.FORWARD
    return None


def scopes_of(op_name: str) -> tuple[str, str]:
    """(dotted path of the module, primitive) of an operation's name.

    >>> scopes_of("jit(step)/transpose(jvp(block1))/dense/jit(relu)/max")
    ('block1.dense', 'max')
    """
    parts = _split(op_name)
    if not parts:
        return "", ""
    unwrapped = []
    for part in parts:
        while (inner := _WRAPPED.match(part)) is not None:
            part = inner.group(1)
        unwrapped.append(part)
    *around, primitive = unwrapped
    names = (name for part in around for name in _split(part))
    scopes = ".".join(name for name in names if _NAME.match(name) and name not in _OWN_SCOPES)
    return scopes, primitive if _NAME.match(primitive) else ""


def _split(name: str) -> list[str]:
    """Parts between slashes that are in no brackets."""
    parts, depth = [""], 0
    for letter in name:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "/" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part]

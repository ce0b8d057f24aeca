"""Reads a program of XLA from its text.

The text that XLA prints after its passes is scheduled: the order of lines in a computation is the order in which they
run. It is the one form of a compiled program that JAX and TensorFlow both give, and it carries where in the user's code
each instruction comes from.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from memfit.core.errors import StepFailed

_WIDTHS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "token": 0, "opaque": 0,
}  # fmt: skip
"""Bits of an element; those of 8-bit floats begin with f8, of smaller ones with f4 and f6."""

_POINTER_BYTES = 8
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](\{[^}]*\})?")
_NAMED = re.compile(r"%([\w.\-]+)")
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{\s*$")
_DEFINITION = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+) = ")
_CALLED = re.compile(r"(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ALIAS = re.compile(r"\{([\d,\s]*)\}: \((\d+), \{([\d,\s]*)\}")
_TABLE_ROW = re.compile(r"^(\d+) (.*)$")
_PAIRS = re.compile(r"(\w+)=(\d+)")
_METADATA = re.compile(r"metadata=\{(.*?)\}(?:, \w+=|$|\s*$)")
_TEXT_FIELD = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_INDEX = re.compile(r"\bindex=(\d+)")
_PLAIN_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_INDEX_COMMENT = re.compile(r"/\*.*?\*/")

Aliases = tuple[tuple[tuple[int, ...], int, tuple[int, ...]], ...]
"""(path in the result, number of the operand or argument, path in it) of values that share memory."""


@dataclass(frozen=True, slots=True)
class Shape:
    """An array, or a tuple of shapes, whose bytes are those of the table of pointers to its parts."""

    text: str  # as XLA prints it, with its layout
    size_bytes: int
    parts: "tuple[Shape, ...] | None" = None  # None for an array
    dimensions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction."""

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...] = ()
    called: dict[str, str] = field(default_factory=dict)  # by attribute; branches of a conditional as "branch0"
    number: int = -1  # of a parameter
    index: int = -1  # of the part that get-tuple-element takes
    aliases: Aliases = ()  # operands that must share memory with its value
    op_name: str = ""  # what the framework called it
    source: tuple[tuple[str, int], ...] = ()  # the user's call stack, innermost first
    attributes: str = ""  # what else is said about it, as it is printed


@dataclass(frozen=True, slots=True)
class Computation:
    """Instructions in the order in which they run."""

    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction


@dataclass(frozen=True, slots=True)
class Module:
    """A program; `aliases` are arguments that share memory with results."""

    entry: Computation
    computations: dict[str, Computation]
    aliases: Aliases


def parse(text: str) -> Module:
    """The program in `text`.

    Raises:
        StepFailed: what was given is no scheduled program.
    """
    lines = text.splitlines()
    first = lines[0] if lines else ""
    if not first.startswith("HloModule"):
        raise StepFailed(f"this is no program of XLA: it begins with {first[:60]!r}, not with 'HloModule'.")
    if "is_scheduled=true" not in first:
        raise StepFailed(
            "this program of XLA has no schedule yet, so nothing can be said about its memory; "
            "the text after all passes is needed ('is_scheduled=true' in its first line)."
        )
    frames = _Frames(lines)
    computations: dict[str, Computation] = {}
    entry = None
    for is_entry, name, body in _bodies(lines):
        made = [_instruction(line, frames) for line in body]
        root = next((one for one, line in zip(made, body, strict=True) if line.lstrip().startswith("ROOT ")), made[-1])
        computations[name] = Computation(name, tuple(made), root)
        entry = computations[name] if is_entry else entry
    if entry is None:
        raise StepFailed("this program of XLA has no entry computation.")
    start = first.find("input_output_alias={")
    aliases = _aliases(first[start : _closing(first, first.index("{", start), "{}")]) if start >= 0 else ()
    return Module(entry, computations, aliases)


def shape_of(text: str) -> Shape:
    """The shape that XLA prints so.

    >>> shape_of("(f32[2,3]{1,0}, pred[])").parts[0].size_bytes
    24
    """
    return _read_shape(_INDEX_COMMENT.sub("", text).strip(), 0)[0]


def _read_shape(text: str, at: int) -> tuple[Shape, int]:
    """(the shape at a place of the text, where it ends)."""
    start = at
    if text[at] == "(":
        at += 1
        parts = []
        while text[at] != ")":
            if text[at] in ", ":
                at += 1
                continue
            part, at = _read_shape(text, at)
            parts.append(part)
        at += 1
        return Shape(text[start:at], _POINTER_BYTES * len(parts), tuple(parts)), at
    array = _ARRAY.match(text, at)
    if array is None:
        raise StepFailed(f"memfit can't read the shape {text[at : at + 60]!r} in a program of XLA.")
    kind, inside, layout = array.groups()
    # A dynamic dimension is printed as its bound, "<=8".
    dimensions = tuple(int(part.strip().removeprefix("<=")) for part in inside.split(",") if part.strip())
    width = _WIDTHS.get(kind, 4 if kind.startswith("f4") else 8)
    if 0 < width < 8 and f"E({width})" not in (layout or ""):
        # Small elements take a byte each unless the layout packs them.
        width = 8
    return Shape(array.group(0), -(-math.prod(dimensions) * width // 8), None, dimensions), array.end()


def _bodies(lines: list[str]) -> Iterator[tuple[bool, str, list[str]]]:
    """(whether it is the entry, name, lines) of each computation."""
    current: tuple[bool, str, list[str]] | None = None
    for line in lines[1:]:
        if current is None:
            header = _HEADER.match(line)
            # Rows of the tables before the first computation begin with a number.
            if header is not None and not line[0].isdigit():
                current = (header.group(1) is not None, header.group(2), [])
        elif line.startswith("}"):
            yield current
            current = None
        elif _DEFINITION.match(line):
            current[2].append(line)
        elif line.strip() and current[2]:
            # A literal that runs over lines.
            current[2][-1] += line


def _instruction(line: str, frames: "_Frames") -> Instruction:
    definition = _DEFINITION.match(line)
    assert definition is not None  # _bodies keeps definitions only
    rest = _INDEX_COMMENT.sub("", line[definition.end() :]).lstrip()
    shape, at = _read_shape(rest, 0)
    opening = rest.index("(", at)
    opcode = rest[at:opening].strip()
    closing = _closing(rest, opening, "()")
    inside, attributes = rest[opening + 1 : closing], rest[closing + 1 :]
    named = _METADATA.search(attributes)
    metadata = named.group(1) if named else ""
    plain = attributes.replace(metadata, "") if metadata else attributes
    called = dict(_CALLED.findall(plain))
    if branches := _BRANCHES.search(plain):
        names = enumerate(branches.group(1).split(","))
        called.update({f"branch{place}": name.strip().lstrip("%") for place, name in names})
    operands: tuple[str, ...] = ()
    if opcode not in ("constant", "parameter", "iota"):
        # Printed with or without their shapes and signs.
        plainly = (part.split()[-1] for part in inside.split(",") if part.strip())
        operands = tuple(_NAMED.findall(inside) if "%" in inside else filter(_PLAIN_NAME.fullmatch, plainly))
    texts = dict(_TEXT_FIELD.findall(metadata))
    index = _INDEX.search(plain) if opcode == "get-tuple-element" else None
    _, aliasing, aliases = plain.partition("output_to_operand_aliasing")
    return Instruction(
        definition.group(2),
        opcode,
        shape,
        operands,
        called,
        int(inside) if opcode == "parameter" else -1,
        int(index.group(1)) if index else -1,
        _aliases(aliases) if aliasing else (),
        texts.get("op_name", ""),
        frames.source(metadata, texts),
        plain,
    )


def _closing(text: str, opening: int, brackets: str) -> int:
    """Where the bracket that opens at a place closes."""
    depth, quoted = 0, False
    for place in range(opening, len(text)):
        letter = text[place]
        quoted ^= letter == '"'
        if letter in brackets and not quoted:
            depth += 1 if letter == brackets[0] else -1
            if depth == 0:
                return place
    raise StepFailed(f"memfit can't read the instruction {text[:80]!r} in a program of XLA.")


def _aliases(text: str) -> Aliases:
    def path(inside: str) -> tuple[int, ...]:
        return tuple(int(part) for part in inside.split(",") if part.strip())

    return tuple((path(result), int(number), path(operand)) for result, number, operand in _ALIAS.findall(text))


class _Frames:
    """The call stacks that a program's text lists once, before its computations."""

    def __init__(self, lines: list[str]) -> None:
        tables: dict[str, dict[int, str]] = {}
        current: dict[int, str] | None = None
        for line in lines[1:]:
            if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                current = tables.setdefault(line, {})
            elif line.endswith("{") and not line[:1].isdigit():
                break
            elif current is not None and (row := _TABLE_ROW.match(line)):
                current[int(row.group(1))] = row.group(2)
        files = {number: row.strip('"') for number, row in tables.get("FileNames", {}).items()}
        self._places = {}
        for number, text in tables.get("FileLocations", {}).items():
            fields = dict(_PAIRS.findall(text))
            self._places[number] = files.get(int(fields.get("file_name_id", 0)), ""), int(fields.get("line", 0))
        self._frames = {number: dict(_PAIRS.findall(row)) for number, row in tables.get("StackFrames", {}).items()}
        # Some versions of XLA count parents from one, where frames that have none name themselves.
        self._offset = int(self._frames.get(1, {}).get("parent_frame_id", 0) == "1")
        self._stacks: dict[int, tuple[tuple[str, int], ...]] = {}

    def source(self, metadata: str, texts: dict[str, str]) -> tuple[tuple[str, int], ...]:
        """The call stack of an instruction, innermost first."""
        numbers = dict(_PAIRS.findall(metadata))
        if "stack_frame_id" not in numbers:
            has_file = "source_file" in texts
            return ((texts["source_file"], int(numbers.get("source_line", 0))),) if has_file else ()
        frame = int(numbers["stack_frame_id"])
        if frame not in self._stacks:
            stack, current, seen = [], frame, set()
            while current in self._frames and current not in seen:
                seen.add(current)
                row = self._frames[current]
                stack.append(self._places.get(int(row.get("file_location_id", 0)), ("", 0)))
                current = int(row.get("parent_frame_id", 0)) - self._offset
            self._stacks[frame] = tuple(place for place in stack if place[0])
        return self._stacks[frame]

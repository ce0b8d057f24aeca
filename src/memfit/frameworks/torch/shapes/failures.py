"""Failures of the user's own step, told in one message with the user's own line."""

import ast
import itertools
import linecache
import os
import re
import textwrap
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.core.errors import BadLoss, MemfitError, StepFailed
from memfit.core.printing import text_of
from memfit.core.user_code import PACKAGE_FOLDER, SourceNames
from memfit.frameworks.torch.shapes.origin import HIDDEN_FOLDERS

_MAX_CHARACTERS = 300
# What to do about failures of a single step, whose tensors memfit moves; a script moves its own.
_STEP_HINTS = {
    "Expected all tensors to be on the same device": (
        "Everything the step uses must be on the simulated device: put teachers, class weights and the like into the "
        "model or the batch, and write x.device instead of the name of a device."
    ),
}
# What to do about failures that the simulation, not the user's code, is the reason of.
_HINTS = {
    "no fake impl": (
        "An operator without a shape rule can't be simulated: register one with torch.library.register_fake."
    ),
    "'LOCAL_RANK'": "A script that torchrun starts needs --count, as in --count 2.",
    "HigherOrderOperator": "This higher-order operator can't be run on shapes yet; torch.cond, scan and others can.",
    "flash_attn": (
        "flash_attn can't be installed without a GPU, and a dry run of a script has a stand-in for its functions of "
        "attention alone. scaled_dot_product_attention (attn_implementation='sdpa') has the same kernel and takes the "
        "same memory; for packed sequences, torch.nn.attention.varlen has it."
    ),
    "'liger_kernel'": "Install it here: its kernels are simulated without a GPU (pip install liger-kernel).",
    "'triton'": (
        "Kernels of Triton are simulated without a GPU, but the package must be here where memfit loads the model: "
        "pip install triton (Linux). A dry run of a script does without."
    ),
    "active drivers": "Triton looked for a GPU outside of the simulated step: launch its kernels in the step alone.",
}
# PyTorch's name of the device that shape-only tensors are on; no script meets it on a GPU.
_SHAPE_ONLY = re.compile(
    r"'?meta'? (tensor|device|backend)|(on|device|device type) '?meta\b|no fake impl|HigherOrderOperator", re.IGNORECASE
)
# Words of PyTorch's operators for sizes that don't go together, one of which a program may have read.
_ABOUT_SIZES = re.compile(r"\b(sizes?|shapes?|nnz|dimensions?|elements|split_sizes)\b", re.IGNORECASE)
# Errors that a program may raise because of a value that it has read.
_ABOUT_VALUES = (AssertionError, ValueError, ArithmeticError, LookupError, StopIteration, SystemExit)

_COMPILER_MODULES = ("torch._dynamo", "torch._inductor", "torch._functorch")
# The last is the name of the functions that the compiler writes.
_COMPILER_FILES = (
    *(f"{HIDDEN_FOLDERS[0]}{name}{os.sep}" for name in ("_dynamo", "_inductor", "_functorch/_aot_autograd")),
    os.path.join(PACKAGE_FOLDER, "frameworks", "torch", "compilation", ""),
    f"{HIDDEN_FOLDERS[0]}compiled_graph",
)
_WRAPPERS = f"{HIDDEN_FOLDERS[0]}_dynamo{os.sep}eval_frame.py"


@contextmanager
def explained(part: str) -> Iterator[None]:
    """Turns any exception of the user's code into `StepFailed` with the line that raised it."""
    try:
        yield
    except MemfitError:
        raise
    except (Exception, SystemExit) as error:
        where, line = _user_line(error)
        text, hint = _text_and_hint(error, _STEP_HINTS | _HINTS)
        message = f"the step failed in its {part}{where}: {type(error).__name__}: {text}"
        raise StepFailed(message + (f"\n    {line}" if line else "") + (f"\n{hint}" if hint else "")) from error


def one_line(error: BaseException) -> str:
    """The error, where the user's code met it, and what to do where the simulation is the reason."""
    where, _ = _user_line(error)
    text, hint = _text_and_hint(error, _HINTS)
    text = textwrap.shorten(text, _MAX_CHARACTERS, placeholder=" ...")
    return f"{type(error).__name__}: {text}{where}{' ' if hint else ''}{hint}"


def _text_and_hint(error: BaseException, hints: dict[str, str]) -> tuple[str, str]:
    text = text_of(error)
    return text, next((hint for sign, hint in hints.items() if sign in text), "")


def suspicion(error: BaseException, stand_ins: Iterable[str]) -> str:
    """Why the simulation may be the reason of a script's failure, or "".

    `stand_ins` are lines at which values were read that stand in for the device's.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or isinstance(error, MemfitError):
        return ""
    last = frames[-1]
    if os.path.abspath(last.filename).startswith(HIDDEN_FOLDERS[1]):
        line = (last.line or "").strip()
        if line.startswith("raise"):
            return "memfit's simulated device refused it, as it takes a GPU to do"
        if "func(" not in line and "plain" not in line:
            return "the error arose in memfit's own code"
    if isinstance(error, RuntimeError | ValueError | TypeError | BufferError) and _SHAPE_ONLY.search(text_of(error)):
        return "PyTorch can't do this with tensors that have a shape and no values, which memfit simulates with"
    # PyTorch's own checks raise this one, too.
    is_raised_outside = type(error) is RuntimeError and not last.filename.startswith(HIDDEN_FOLDERS)
    is_about_sizes = type(error) is RuntimeError and _ABOUT_SIZES.search(text_of(error))
    if (
        isinstance(error, _ABOUT_VALUES)
        or is_about_sizes
        or (is_raised_outside and (last.line or "").startswith("raise"))
    ):
        read = _read_before(frames, stand_ins)
        if read:
            return f"it had read values that stand in for the device's ({read})"
    return ""


def is_of_compiler(error: BaseException) -> bool:
    """Whether the compiler failed, or code that it made; not where code that it calls raises an error of its own."""
    known: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and not any(link is each for each in known):
        known.append(link)
        if type(link).__module__.startswith(_COMPILER_MODULES):
            return True
        # What fails in it is further in than the program's last line; its wrappers are around uncompiled code, too.
        for depth, frame in enumerate(reversed(traceback.extract_tb(link.__traceback__))):
            if frame.filename.startswith(_COMPILER_FILES) and (depth == 0 or frame.filename != _WRAPPERS):
                return True
            if not frame.filename.startswith((*HIDDEN_FOLDERS, "<frozen")):
                break
        link = link.__cause__ or link.__context__
    return False


def _read_before(frames: Iterable[traceback.FrameSummary], stand_ins: Iterable[str]) -> str:
    """The last line at which a value was read that may decide what the failing lines do, or ""."""
    names = SourceNames()
    failing: dict[str, set[int]] = {}
    for frame in frames:
        failing.setdefault(frame.filename, set()).add(frame.lineno or 0)
    files = {names.short(path): path for path in failing}
    for source in reversed(list(stand_ins)):
        name, _, line = source.rpartition(":")
        path = files.get(name)
        if path and line.isdigit() and may_reach("".join(linecache.getlines(path)), [int(line)], failing[path]):
            return source
    return ""


def _user_line(error: BaseException) -> tuple[str, str]:
    """(" at file.py:31 in forward", the code of that line) of the innermost frame outside of the framework."""
    names = SourceNames()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith("<frozen"):
            continue
        if not os.path.abspath(frame.filename).startswith(HIDDEN_FOLDERS):
            return f" at {names.short(frame.filename)}:{frame.lineno} in {frame.name}", frame.line or ""
    return "", ""


def check_loss(value: Any) -> None:
    """Refuses what can't be differentiated."""
    if not isinstance(value, torch.Tensor):
        raise BadLoss(
            f"the loss function returned {type(value).__name__}, not a tensor. "
            "It must return the scalar loss itself, such as `output.loss`."
        )
    if value.numel() != 1:
        raise BadLoss(
            f"the loss has shape {tuple(value.shape)}, but a scalar is needed to differentiate. "
            "Reduce it, for example with .mean()."
        )
    if not value.requires_grad:
        raise BadLoss(
            "the loss does not depend on any parameter that requires a gradient. "
            "Check for torch.no_grad(), .detach() or .item() on its way, or use mode='inference'."
        )


_COLLECTING = {"add", "append", "appendleft", "extend", "insert", "put", "setdefault", "update"}
_LEAVING = (ast.Break, ast.Continue, ast.Return)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.ClassDef, ast.Module)

# A variable with the function it belongs to; None for those of the module, attributes and functions.
_Name = tuple[ast.stmt | None, str]


def may_reach(text: str, read: Iterable[int], lines: Iterable[int]) -> bool:
    r"""Whether values that were read at some lines of a program may decide what happens at others.

    True where that isn't known.

    >>> may_reach("n = x.item()\nassert n > 1\nassert y > 1", read=[1], lines=[2])
    True
    >>> may_reach("n = x.item()\nassert n > 1\nassert y > 1", read=[1], lines=[3])
    False
    """
    try:
        flow = _Flow(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError):
        return True
    starts, ends = ([flow.statement_at(line) for line in each] for each in (read, lines))
    if None in starts or None in ends:
        return True
    flow.follow({statement for statement in starts if statement is not None})
    return any(statement in flow.carrying for statement in ends)


class _Flow:
    """What carries a value in a program."""

    def __init__(self, tree: ast.Module) -> None:
        self._parents: dict[ast.stmt, ast.stmt | ast.Module] = {}
        owners: dict[ast.AST, ast.stmt | ast.Module] = {tree: tree}
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.stmt):
                    self._parents[child] = owners[node]
                owners[child] = child if isinstance(child, ast.stmt) else owners[node]
        self._functions = [each for each in self._parents if isinstance(each, _FUNCTIONS)]
        self._locals: dict[ast.stmt, set[str]] = {}
        for function in self._functions:
            parameters = (each for each in ast.walk(function.args) if isinstance(each, ast.arg))
            self._locals[function] = {each.arg for each in parameters}
        for statement in self._parents:
            owner = self._function_of(statement)
            if owner is not None:
                self._locals[owner].update(
                    node.id for node in _nodes(statement) if isinstance(node, ast.Name) and _is_stored(node)
                )
        self._names: set[_Name] = set()
        self._starts: set[ast.stmt] = set()
        self.carrying: set[ast.stmt] = set()

    def statement_at(self, line: int) -> ast.stmt | None:
        """The innermost statement of a line: outer ones come first."""
        at_line = [each for each in self._parents if each.lineno <= line <= (each.end_lineno or each.lineno)]
        return at_line[-1] if at_line else None

    def follow(self, starts: set[ast.stmt]) -> None:
        """Follows what some statements read."""
        self._starts, self.carrying = starts, set(starts)
        known = -1
        while known != len(self.carrying) + len(self._names):
            known = len(self.carrying) + len(self._names)
            for statement in self._parents:
                if not isinstance(statement, _SCOPES) and self._is_decided(statement):
                    self.carrying.add(statement)
                    self._pass_on(statement)

    def _is_decided(self, statement: ast.stmt) -> bool:
        parent = self._parents[statement]
        is_inside = not isinstance(parent, _SCOPES) and parent in self.carrying
        return statement in self.carrying or is_inside or self._carries(_nodes(statement), statement)

    def _carries(self, nodes: Iterable[ast.AST], statement: ast.stmt) -> bool:
        is_changed = isinstance(statement, ast.AugAssign)
        return any(
            self._key(node, statement) in self._names
            for node in nodes
            if isinstance(node, ast.Name | ast.Attribute) and (is_changed or isinstance(node.ctx, ast.Load))
        )

    def _pass_on(self, statement: ast.stmt) -> None:
        nodes = list(_nodes(statement))
        stored = (node for node in nodes if _is_stored(node) and not isinstance(node, ast.Tuple | ast.List))
        self._names.update(self._key(node, statement) for node in stored)
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Attribute) and call.func.attr in _COLLECTING:
                self._names.add(self._key(call.func.value, statement))
            self._hand_over(call, statement)
        self._names.discard((None, ""))
        function = self._function_of(statement)
        returns = isinstance(statement, ast.Return) or any(isinstance(node, ast.Yield) for node in nodes)
        if function is not None and returns:
            self._names.add((None, function.name))
        if isinstance(statement, _LEAVING) and statement not in self._starts:
            # Whether what follows is run at all depends on it.
            within = itertools.takewhile(lambda each: not isinstance(each, _SCOPES), self._above(statement))
            self.carrying.update(each for each in within if isinstance(each, _LOOPS))

    def _hand_over(self, call: ast.Call, statement: ast.stmt) -> None:
        """Parameters of the program's own functions carry what they are given."""
        for function in (each for each in self._functions if each.name == _name(call.func)):
            names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
            names = names[1:] if isinstance(call.func, ast.Attribute) and names[:1] == ["self"] else names
            given = [*zip(names, call.args, strict=False), *((each.arg, each.value) for each in call.keywords)]
            for name, value in given:
                is_read = statement in self._starts and any(isinstance(node, ast.Call) for node in _walk([value]))
                if name is not None and (is_read or self._carries(_walk([value]), statement)):
                    self._names.add((function, name))

    def _key(self, node: ast.AST, statement: ast.stmt) -> _Name:
        while isinstance(node, ast.Subscript | ast.Starred):
            node = node.value
        name = _name(node)
        if isinstance(node, ast.Name):
            for function in self._above(statement):
                if name in self._locals.get(function, ()):
                    return function, name
        return None, name

    def _function_of(self, statement: ast.stmt) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        return next((each for each in self._above(statement) if isinstance(each, _FUNCTIONS)), None)

    def _above(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        """What a statement is in, from the inside out."""
        parent = self._parents[statement]
        while not isinstance(parent, ast.Module):
            yield parent
            parent = self._parents[parent]


def _is_stored(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store)


def _walk(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Nodes and what they are made of, without statements."""
    for node in nodes:
        if not isinstance(node, ast.stmt):
            yield node
            yield from _walk(ast.iter_child_nodes(node))


def _nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    return _walk(ast.iter_child_nodes(statement))


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""

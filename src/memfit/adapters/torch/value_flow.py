"""Whether a value that a program reads at one line may decide what happens at another.

By names alone, read off the source: what is assigned from a value carries it, whatever the order of the lines, and so
does what is assigned where such a value decides. Attributes and functions of one name are one and the same. So the
answer no is a good one, and yes means perhaps.
"""

import ast
from collections.abc import Iterable, Iterator

_COLLECTING = {"add", "append", "appendleft", "extend", "insert", "put", "setdefault", "update"}
_LEAVING = (ast.Break, ast.Continue, ast.Return)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.ClassDef, ast.Module)

# A variable with the function it belongs to; None for those of the module, attributes and functions.
_Name = tuple[ast.stmt | None, str]


def may_reach(text: str, read: Iterable[int], lines: Iterable[int]) -> bool:
    r"""Whether values that were read at some lines may decide what happens at others; True where that isn't known.

    Args:
        text: of the program.
        read: numbers of the lines at which values were read.
        lines: numbers of the others.

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
        self._statements: list[ast.stmt] = []
        self._collect(tree, tree)
        self._functions = [each for each in self._statements if isinstance(each, _FUNCTIONS)]
        self._locals: dict[ast.stmt, set[str]] = {each: _parameters(each) for each in self._functions}
        for statement in self._statements:
            function = self._function_of(statement)
            if function is not None:
                stored = (node for node in _nodes(statement) if isinstance(getattr(node, "ctx", None), ast.Store))
                self._locals[function].update(n.id for n in stored if isinstance(n, ast.Name))
        self._names: set[_Name] = set()
        self._starts: set[ast.stmt] = set()
        self.carrying: set[ast.stmt] = set()

    def _collect(self, node: ast.AST, owner: ast.stmt | ast.Module) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self._parents[child] = owner
                self._statements.append(child)
                self._collect(child, child)
            else:
                self._collect(child, owner)

    def statement_at(self, line: int) -> ast.stmt | None:
        """The innermost statement of a line."""
        found = [each for each in self._statements if each.lineno <= line <= (each.end_lineno or each.lineno)]
        return found[-1] if found else None

    def follow(self, starts: set[ast.stmt]) -> None:
        """Follows what some statements read."""
        self._starts, self.carrying = starts, set(starts)
        known = -1
        while known != len(self.carrying) + len(self._names):
            known = len(self.carrying) + len(self._names)
            for statement in self._statements:
                if statement in self.carrying or self._is_decided(statement):
                    self.carrying.add(statement)
                    self._pass_on(statement)

    def _is_decided(self, statement: ast.stmt) -> bool:
        if isinstance(statement, _SCOPES):
            return False
        parent = self._parents[statement]
        return (not isinstance(parent, _SCOPES) and parent in self.carrying) or self._carries(
            _nodes(statement), statement
        )

    def _carries(self, nodes: Iterable[ast.AST], statement: ast.stmt) -> bool:
        is_changed = isinstance(statement, ast.AugAssign)
        return any(
            self._key(node, statement) in self._names
            for node in nodes
            if isinstance(node, ast.Name | ast.Attribute) and (is_changed or isinstance(node.ctx, ast.Load))
        )

    def _pass_on(self, statement: ast.stmt) -> None:
        if isinstance(statement, _SCOPES):
            return
        nodes = list(_nodes(statement))
        self._names.update(
            self._key(node, statement)
            for node in nodes
            if isinstance(getattr(node, "ctx", None), ast.Store) and not isinstance(node, ast.Tuple | ast.List)
        )
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Attribute) and call.func.attr in _COLLECTING:
                self._names.add(self._key(call.func.value, statement))
            self._hand_over(call, statement)
        self._names.discard((None, ""))
        above = list(self._above(statement))
        if isinstance(statement, ast.Return) or any(isinstance(node, ast.Yield) for node in nodes):
            self._names.update((None, each.name) for each in above if isinstance(each, _FUNCTIONS))
        if isinstance(statement, _LEAVING):
            # Whether what follows is run at all depends on it.
            self.carrying.update(each for each in above if isinstance(each, _LOOPS) and statement not in self._starts)

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
            function = self._function_of(statement)
            while function is not None:
                if name in self._locals[function]:
                    return function, name
                function = self._function_of(function)
        return None, name

    def _function_of(self, statement: ast.stmt) -> ast.stmt | None:
        parent = self._parents[statement]
        while not isinstance(parent, ast.Module):
            if isinstance(parent, _FUNCTIONS):
                return parent
            parent = self._parents[parent]
        return None

    def _above(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        """What a statement is in, up to its function."""
        parent = self._parents[statement]
        while not isinstance(parent, ast.Module):
            yield parent
            if isinstance(parent, _SCOPES):
                return
            parent = self._parents[parent]


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


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    given = function.args
    every = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
    return {each.arg for each in every if each is not None}

"""Where an allocation comes from: the module and the line of the user's code.

In the forward pass both are at hand: a stack of the modules being called, and the Python frames. In the backward pass
neither is, but each autograd node carries the sequence number it got when its forward operator ran; `OriginTracker`
remembers what was running at each number.
"""

import linecache
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import CodeType, FrameType
from typing import Any

import torch

from memfit.core.patching import Replacement, replaced
from memfit.core.user_code import INSTALLED_FOLDERS, PACKAGE_FOLDER, SourceNames
from memfit.frameworks.torch import internals

HIDDEN_FOLDERS = (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, PACKAGE_FOLDER)
# Frames outside of a tracer belong to whoever asked for the trace, not to the step.
_DRIVERS = ("StepTracer.", "_Tracer.")
_NOWHERE = ("", "")


def calling_frames(most: int | None = None) -> Iterator[FrameType]:
    """The frames of the caller, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(most) if most is not None else count():
        if frame is None:
            return
        yield frame
        frame = frame.f_back


class OriginTracker:
    """Knows the module path and the source line of whatever PyTorch is doing.

    Args:
        model: the module whose parts have names; None when models are met as they are called.
        met: takes (module, its name) when a module is called that is part of no known one.
        entered: called when a model, rather than a part of one, is called.
        hidden: folders whose lines are no more the user's than PyTorch's are.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        met: Callable[[torch.nn.Module, str], None] = lambda module, name: None,
        entered: Callable[[torch.nn.Module], None] = lambda module: None,
        hidden: tuple[str, ...] = (),
    ) -> None:
        self._paths: dict[int, tuple[str, weakref.ref[torch.nn.Module]]] = {}
        self._met = met
        self._entered = entered
        self._hidden = (*HIDDEN_FOLDERS, *hidden)
        self._num_models = 0
        self._meets_models = model is None
        if model is not None:
            self._name_parts(model, "")
        self._stack: list[str] = [""]
        self._by_sequence: dict[int, tuple[str, str]] = {}
        self._labels: dict[CodeType, str | None] = {}
        self._shortener = SourceNames()
        self._plain_call: Callable[..., Any] = torch.nn.Module.__call__

    def _name_parts(self, model: torch.nn.Module, prefix: str) -> None:
        for name, module in model.named_modules():
            path = uncompiled_path(name)
            self.name(module, f"{prefix}.{path}" if prefix and path else prefix or path)

    def name(self, module: torch.nn.Module, path: str) -> None:
        """Gives a module its path, unless it has one."""
        key = id(module)
        if key not in self._paths:
            # A number may come back for another module once this one is gone.
            self._paths[key] = (path, weakref.ref(module, lambda _: self._paths.pop(key, None)))

    def meet(self, model: torch.nn.Module) -> None:
        """Names the parts of a model that isn't called where this can see it, unless it has been met."""
        if self._meets_models and id(model) not in self._paths:
            self._meet(model)

    def _meet(self, model: torch.nn.Module) -> None:
        # Its parts are named by their path, from the second model on behind the name of the model.
        has_parameters = next(model.parameters(), None) is not None
        prefix = "" if has_parameters and not self._num_models else type(model).__name__
        self._num_models += has_parameters
        self._name_parts(model, prefix)
        self._met(model, prefix)

    def path(self, module: torch.nn.Module) -> str:
        """The path of a module that has been met."""
        return self._paths[id(module)][0] if id(module) in self._paths else ""

    def _path_of(self, module: torch.nn.Module) -> str:
        """The path of a module being called; one that is part of no known model is met here."""
        outermost = len(self._stack) == 1
        if id(module) not in self._paths:
            if not outermost or not self._meets_models:
                return self._stack[-1]
            self._meet(module)
        if outermost:
            self._entered(module)
        return self._paths[id(module)][0]

    def current(self) -> tuple[str, str]:
        """(module path, source line) of what runs now."""
        return self._in_backward() or (self._stack[-1], self.source())

    def module(self) -> str:
        """The module path of what runs now."""
        origin = self._in_backward()
        return self._stack[-1] if origin is None else origin[0]

    def _in_backward(self) -> tuple[str, str] | None:
        node = internals.current_autograd_node()
        if node is None or torch.is_grad_enabled():
            return None
        return self._by_sequence.get(internals.number_of(node), _NOWHERE)

    def remember(self) -> None:
        """Notes what runs now under the sequence number of the autograd node that is being made for it."""
        number = internals.sequence_number() - 1
        # An operator that makes no node (a buffer's update) must not take over the number of the node before it.
        if number not in self._by_sequence:
            self._by_sequence[number] = (self._stack[-1], self.source())

    def source(self) -> str:
        """Innermost line of the step outside of PyTorch and memfit, as "file.py:31", or ""."""
        frame: FrameType | None = sys._getframe(1)
        labels = self._labels
        while frame is not None:
            code = frame.f_code
            try:
                label = labels[code]
            except KeyError:
                label = labels[code] = self._label(code)
            if label is not None:
                return f"{label}:{frame.f_lineno}" if label else ""
            frame = frame.f_back
        return ""

    def user_line(self) -> tuple[str, str]:
        """("train.py:31", the text of that line) of the innermost frame of the user's own code, or ("", "")."""
        for frame in calling_frames():
            path = frame.f_code.co_filename
            if not path.startswith((*HIDDEN_FOLDERS, *INSTALLED_FOLDERS, "<")):
                text = linecache.getline(path, frame.f_lineno, frame.f_globals).strip()
                return f"{self._shortener.short(path)}:{frame.f_lineno}", text
        return "", ""

    def short(self, path: str) -> str:
        """The name that the file at `path` has in sources."""
        return self._shortener.short(path)

    def _label(self, code: CodeType) -> str | None:
        path = code.co_filename
        if path.startswith(PACKAGE_FOLDER) and code.co_qualname.startswith(_DRIVERS):
            return ""
        if path.startswith(self._hidden) or path.startswith("<frozen") or "importlib" in path:
            return None
        return self._shortener.short(path)

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """What runs while this lasts belongs to `name`, unless a module is called."""
        self._stack.append(name)
        try:
            yield
        finally:
            self._stack.pop()

    @contextmanager
    def following(self, is_on: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Keeps the stack of modules of threads that are on, by standing in front of `Module.__call__`."""
        plain: Callable[..., Any] = torch.nn.Module.__call__
        stack, path_of = self._stack, self._path_of

        # PyTorch's profiler knows this function by its place and looks for its `self`.
        def call(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if not is_on():
                return plain(self, *args, **kwargs)
            stack.append(path_of(self))
            try:
                return plain(self, *args, **kwargs)
            finally:
                stack.pop()

        self._plain_call = plain
        with replaced([Replacement(torch.nn.Module, "__call__", call)]):
            yield

    @contextmanager
    def not_following(self) -> Iterator[None]:
        """Modules are called as PyTorch has it while this lasts: its compiler looks into the call."""
        with replaced([Replacement(torch.nn.Module, "__call__", self._plain_call)]):
            yield


def uncompiled_path(path: str) -> str:
    """The path of a module or parameter as it would be without `torch.compile`.

    >>> uncompiled_path("_orig_mod.layers.0._orig_mod")
    'layers.0'
    """
    return ".".join(part for part in path.split(".") if part != "_orig_mod") if "_orig_mod" in path else path

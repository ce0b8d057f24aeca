"""Python's garbage collector at the pace that a step has without a tracer around it.

Some layers leave cycles behind that hold tensors until Python collects them, and Python collects after a number of new
objects. Tracing makes several times as many: counted, they would free those tensors earlier than a real step does.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from memfit.adapters.torch.dispatch import SimulatedOperators


class UsualCollector:
    """Collects by the objects of the traced program alone; what its operators make does not count."""

    def __init__(self) -> None:
        self._thresholds = gc.get_threshold()
        self._depth = 0
        self._before = 0
        self._own = 0

    @contextmanager
    def running(self, operators: SimulatedOperators) -> Iterator[None]:
        """Collects while it lasts, from a count of nothing on; the collector is off before and after."""
        gc.collect()
        gc.callbacks.append(self._collected)
        operators.around = self
        gc.enable()
        try:
            yield
        finally:
            gc.disable()
            operators.around = nullcontext()
            gc.callbacks.remove(self._collected)
            gc.set_threshold(*self._thresholds)

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            gc.disable()
            self._before = gc.get_count()[0]

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._own += gc.get_count()[0] - self._before
            # A threshold of nothing would turn the collector off.
            gc.set_threshold(max(1, self._thresholds[0] + self._own), *self._thresholds[1:])
            gc.enable()

    def _collected(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "stop":
            self._own = 0
            gc.set_threshold(*self._thresholds)

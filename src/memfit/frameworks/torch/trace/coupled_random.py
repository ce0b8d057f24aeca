"""Random numbers that belong to samples, so that the loss of a part can be compared with the loss of the whole.

The noise of a diffusion loss or of a variational autoencoder is drawn for a whole batch at once; run on a part of it,
the same seed gives its samples other numbers. In this mode each draw is made for all samples and the part's rows
are taken out of it, so that a sample gets the same numbers in whichever company it is.
"""

from typing import Any

import torch

from memfit.frameworks.torch import internals

# Operators that draw a fixed number of random numbers for each element of their first argument.
_ELEMENTWISE = frozenset(
    """bernoulli bernoulli_ normal normal_ uniform_ random_ exponential_ log_normal_ cauchy_ geometric_ randn_like
    rand_like randint_like native_dropout rrelu_with_noise
    """.split()  # noqa: SIM905
)
_BY_SIZE = frozenset({"rand", "randn", "randint", "normal"})
_CROSS_ENTROPIES = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
# Operators that pick by number along the dimension that comes second.
_PICKING = frozenset({"gather", "scatter", "scatter_", "index_select"})
# ATen/core/Reduction.h.
_MEAN = 1


class CoupledRandom(internals.TorchDispatchMode):
    """Draws for all samples, gives out the rows of a part: those from `start` up to, not including, `stop`."""

    def __init__(self, start: int, stop: int, num_samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._start, self._stop, self._num_samples = start, stop, num_samples
        self.num_draws = 0
        """How often numbers were drawn for samples."""
        self.narrowest: torch.dtype = torch.float64
        """The floating-point type of fewest bits that an operator gave."""
        self.checks_indices = True
        """Whether every operator so far refuses indices out of range, rather than reading whatever is there."""
        self.num_classes = 0
        """Of the cross-entropy that had the fewest, 0 before there was one."""
        self.num_picked = 0
        """Of what was picked from by number, the fewest; 0 before. A tensor's rows for each sample don't count."""
        self.weighs_classes = False
        """Whether a mean of cross-entropies over several samples gives classes different weights, other than none."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise the first operator waits seconds for the compiler to be imported.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator; the ones that draw, for all samples."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _ELEMENTWISE and args and isinstance(args[0], torch.Tensor):
            return self._draw_elements(func, args, kwargs)
        if name in _BY_SIZE:
            return self._draw_by_size(func, args, kwargs)
        if name in _CROSS_ENTROPIES:
            self._note_classes(*args)
        elif name in _PICKING:
            self._note_picked(args[0], [args[1]])
        elif name == "index":
            numbers = [dim for dim, index in enumerate(args[1]) if index is not None and index.dtype is torch.int64]
            self._note_picked(args[0], numbers)
        if name == "_ctc_loss" or func.namespace != "aten":
            self.checks_indices = False
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self.narrowest = min(self.narrowest, result.dtype, key=lambda dtype: torch.finfo(dtype).bits)
        return result

    def _note_classes(
        self, logits: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor | None, reduction: int, *_: Any
    ) -> None:
        num_classes = logits.shape[1] if logits.dim() > 1 else len(logits)
        self.num_classes = min(self.num_classes or num_classes, num_classes)
        is_of_samples = self._stop - self._start > 1 and self._rows(labels.numel()) > 0
        # A weight of 0 leaves elements out, as `ignore_index` does.
        if weight is not None and reduction == _MEAN and is_of_samples:
            self.weighs_classes |= len(weight[weight != 0].unique()) > 1

    def _note_picked(self, values: torch.Tensor, dimensions: list[int]) -> None:
        sizes = [values.shape[dim] for dim in dimensions if values.dim()]
        # By `values[arange(number of samples), labels]` each sample picks in its own row.
        sizes = [size for size in sizes if size != self._stop - self._start]
        self.num_picked = min([self.num_picked, *sizes] if self.num_picked else sizes, default=self.num_picked)

    def _rows(self, num_rows: int) -> int:
        """Rows of each sample in a tensor of `num_rows`; 0 where rows aren't the samples'."""
        size = self._stop - self._start
        return num_rows // size if num_rows % size == 0 else 0

    def _draw_elements(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args[0]
        rows = self._rows(given.shape[0]) if given.dim() else 0
        if not rows:
            return func(*args, **kwargs)
        everyone = given.new_zeros((rows * self._num_samples, *given.shape[1:]))
        everyone[rows * self._start : rows * self._stop] = given
        drawn = self._seeded(func, (everyone, *args[1:]), kwargs)
        mine = _first_rows(drawn, rows * self._start, rows * self._stop)
        return given.copy_(mine) if func.overloadpacket.__name__.endswith("_") else mine

    def _draw_by_size(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = next((i for i, arg in enumerate(args) if isinstance(arg, list | tuple) and arg), None)
        rows = self._rows(args[place][0]) if place is not None else 0
        if place is None or not rows:
            return func(*args, **kwargs)
        size = [rows * self._num_samples, *args[place][1:]]
        drawn = self._seeded(func, (*args[:place], size, *args[place + 1 :]), kwargs)
        return _first_rows(drawn, rows * self._start, rows * self._stop)

    def _seeded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Each draw has a seed of its own: however many numbers it takes, the next one is the same."""
        device = args[0].device if isinstance(args[0], torch.Tensor) else torch.device(kwargs.get("device") or "cpu")
        on_cuda = device.type == "cuda"
        # `torch.manual_seed` would do, but imports the compiler.
        generator = torch.cuda.default_generators[device.index or 0] if on_cuda else torch.default_generator
        kept = generator.get_state()
        self.num_draws += 1
        generator.manual_seed(self.num_draws)
        try:
            # Without the user's generator, whose state must not move.
            kwargs = {name: None if name == "generator" else value for name, value in kwargs.items()}
            return func(*(None if isinstance(arg, torch.Generator) else arg for arg in args), **kwargs)
        finally:
            generator.set_state(kept)


def _first_rows(drawn: Any, start: int, stop: int) -> Any:
    if isinstance(drawn, torch.Tensor):
        return drawn[start:stop]
    return type(drawn)(part[start:stop] if isinstance(part, torch.Tensor) else part for part in drawn)

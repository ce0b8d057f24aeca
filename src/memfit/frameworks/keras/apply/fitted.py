"""A compiled Keras model whose training step is run as the settings of a plan say.

The batch that Keras gives stays the batch of one update: schedules, clipping, moving averages, weight decay and loss
scaling are the optimizer's, which is applied once for it. Keras's own `gradient_accumulation_steps` counts batches
instead, averages their losses whatever their sizes, and advances schedules with each.

Everything is done to the one instance and can be undone: `fit`, `train_on_batch` and callbacks stay as they are.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import keras

from memfit.core.errors import BadInput, BadModel
from memfit.core.settings import Settings
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.apply import low_rank, precision, recomputation
from memfit.frameworks.keras.model import IS_SPLIT, check_model, has_own_step, layer_paths


class FittedModel:
    """A compiled model as settings say, until `undo`.

    With `approximate`, micro-batches are allowed where they differ from the plain step by more than rounding and random
    numbers: layers that keep statistics of batches, and losses that don't add up.
    """

    def __init__(self, settings: Settings, model: Any, approximate: bool = False) -> None:
        check_model(model, training=True)
        self.model = model
        self._allows = approximate
        self._undo = ExitStack()
        self.settings = Settings()
        self.change(settings)

    @property
    def approximate(self) -> str:
        """What differs from the plain step by more than rounding, in words; "" if nothing does."""
        texts = []
        if self.settings.splits:
            statistics, random = with_statistics(self.model), with_random_numbers(self.model)
            if statistics:
                texts.append(f"{in_words(statistics)} use the statistics of each micro-batch")
            if random:
                texts.append(f"{in_words(random)} draw other random numbers than for the whole batch")
        texts += [low_rank.difference(self.settings), precision.difference(self.settings)]
        return "; ".join(filter(None, texts))

    def change(self, settings: Settings) -> None:
        """Runs the step by other settings. If they can't be met, the model is as it was before any."""
        self.undo()
        with ExitStack() as undo:
            self._apply(settings, undo)
            self._undo = undo.pop_all()
        self.settings = settings

    def undo(self) -> None:
        """Leaves the model as it was given; weights and the optimizer's state are kept."""
        self._undo.close()
        self.settings = Settings()

    def __enter__(self) -> "FittedModel":
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def _apply(self, settings: Settings, undo: ExitStack) -> None:
        model, moves = self.model, _moves(settings)
        if settings.splits:
            check_split(model, approximate=self._allows)
        is_compiled_otherwise = settings.jit_compile is not None and settings.jit_compile != model.jit_compile
        if moves or settings.splits or is_compiled_otherwise:
            # Keras traces or compiles the step anew, then and when all is undone.
            undo.callback(setattr, model, "train_function", None)
            model.train_function = None
        if is_compiled_otherwise:
            if settings.jit_compile and model.run_eagerly:
                raise BadInput(
                    "jit_compile=True was asked for, but the model was compiled with run_eagerly=True. "
                    "Compile it without run_eagerly."
                )
            undo.callback(setattr, model, "jit_compile", model.jit_compile)
            model.jit_compile = settings.jit_compile
        for move in moves:
            undo.callback(move.apply(settings, model))
        if settings.splits:
            steps = importlib.import_module(f"memfit.frameworks.keras.apply.{keras.backend.backend()}_steps")
            split = steps.BackendSplitStep(settings, model, model.train_step, self._allows)
            was_built = bool(model.built)

            def train_step(*arguments: Any) -> Any:
                # A model may only have its layers once it is run.
                if not was_built and not self._allows:
                    _check_statistics(model)
                return split(*arguments)

            setattr(train_step, IS_SPLIT, True)
            undo.callback(model.__dict__.pop, "train_step", None)
            model.train_step = train_step


def check_split(model: Any, *, approximate: bool) -> None:
    """Refuses a model whose batches can't be split into parts."""
    kind = type(model)
    if has_own_step(model):
        raise BadModel(
            f"{kind.__name__} has a train_step of its own, whose batches can't be split into micro-batches. Leave "
            "micro-batches out, or move what it does into compute_loss, which can."
        )
    if internals.uses_nnx():
        raise BadModel("Keras with flax nnx can't be split into micro-batches. Leave one of the two out.")
    if not approximate:
        _check_statistics(model)


def _check_statistics(model: Any) -> None:
    statistics = with_statistics(model)
    if statistics:
        keeps = "keeps" if len(statistics) == 1 else "keep"
        raise BadModel(
            f"the model {model.name!r} can't be split into micro-batches without changing what it learns: "
            f"{in_words(statistics)} {keeps} statistics of each batch. Freeze or replace such layers, leave "
            "micro-batches out, or allow what is approximate (approximate=True)."
        )


def _moves(settings: Settings) -> list[ModuleType]:
    """What puts the other settings into practice, in the order in which it is applied."""
    is_adapted = settings.lora_rank or settings.quantized_base
    asked = ((low_rank, is_adapted), (precision, settings.precision), (recomputation, settings.checkpoint))
    return [move for move, value in asked if value]


@contextmanager
def applied(model: Any, settings: Settings | None, *, training: bool) -> Iterator[None]:
    """Runs the model as settings say while it lasts, whether or not its numbers stay what they are."""
    with ExitStack() as stack:
        if settings is not None and training:
            stack.callback(FittedModel(settings, model, approximate=True).undo)
        elif settings is not None:
            stack.callback(precision.apply(settings, model))
        yield


_SHOWN = 3


def with_statistics(model: Any) -> list[str]:
    """Paths of the layers that change variables of their own as they are called in training.

    Statistics of the parts of a batch aren't those of the batch, which changes what is trained; other random numbers
    from the same distribution don't.
    """

    def changes(layer: Any) -> bool:
        if isinstance(layer, keras.layers.BatchNormalization):
            # A frozen one uses its moving statistics, and leaves them.
            return bool(layer.trainable)
        if isinstance(layer, keras.layers.RNN):
            return bool(layer.stateful)
        if isinstance(layer, keras.layers.Normalization):
            return False
        trained, others, seeds = internals.own_variables(layer)
        known = {id(variable) for variable in (*trained, *seeds)}
        return any(id(variable) not in known for variable in others)

    return _paths(model, changes)


def with_random_numbers(model: Any) -> list[str]:
    """Paths of the layers that draw random numbers in training."""

    def draws(layer: Any) -> bool:
        # Layers of Keras make their generator whether or not they will use it.
        rates = [getattr(layer, name, None) for name in ("rate", "dropout", "recurrent_dropout")]
        numbers = [rate for rate in rates if isinstance(rate, int | float)]
        return bool(internals.own_variables(layer)[2]) and (not numbers or any(numbers))

    return _paths(model, draws)


def _paths(model: Any, is_meant: Callable[[Any], bool]) -> list[str]:
    paths = layer_paths(model)
    return [paths.get(id(layer), layer.name) for layer in internals.layers_of(model) if is_meant(layer)]


def in_words(paths: list[str]) -> str:
    """Some paths in words."""
    left = len(paths) - _SHOWN
    shown = ", ".join(repr(path) for path in paths[:_SHOWN])
    return f"{shown} and {left} more" if left > 0 else shown

"""A `fit` of Keras as a guard sees it: steps that can be undone, settings put on and off, state to disk and back."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import keras

from memfit.adapters.keras.fitting.fitted import FittedModel
from memfit.adapters.keras.fitting.layer_state import with_statistics
from memfit.adapters.keras.guarding import oom, randomness, variables
from memfit.adapters.keras.guarding.callback_state import CallbackStates
from memfit.adapters.keras.guarding.data import Data
from memfit.adapters.keras.guarding.steps import make_steps
from memfit.adapters.keras.guarding.stored import ArrayFile, Entry, Plain, write_arrays
from memfit.adapters.keras.model import check_model
from memfit.adapters.keras.planning import loop_factor
from memfit.core.errors import BadModel
from memfit.core.guarding import BadCheckpoint, BatchSize, OutOfMemory, Where
from memfit.core.plain_files import read_plain
from memfit.core.settings import Settings
from memfit.core.typed_data import Count, mismatch
from memfit.core.units import format_size

_VARIABLES, _ARRAYS, _PROGRESS = "variables.safetensors", "arrays.safetensors", "progress.json"


class KerasLoop:
    """One call of `fit`.

    Args:
        model: compiled.
        iterator: Keras's iterator of epochs, or None.
        callbacks: Keras's, without memfit's own.
        each: called with each batch.
        approximate: whether batches may be split where that changes what is learned.
        is_ordered: whether the order of the data has to be one that can be come back to.
    """

    def __init__(
        self,
        model: Any,
        iterator: Any,
        callbacks: list[Any],
        each: Callable[[Any], Any],
        *,
        approximate: bool,
        is_ordered: bool,
    ) -> None:
        check_fit(model)
        self.model = model
        self.data = Data(iterator, is_ordered=is_ordered)
        self._iterator = iterator
        self._callbacks = callbacks
        self._states: CallbackStates | None = None
        self._approximate = approximate
        self._fitted: FittedModel | None = None
        self._steps = make_steps(model, each)
        self._settings = Settings()
        self._is_built = False
        self._steps.install()

    # One batch.

    def size_of(self, batch: Any) -> BatchSize:
        """Samples of a batch; None where its arrays don't agree on it."""
        sizes = set()
        for part in keras.tree.flatten(batch):
            shape = getattr(part, "shape", None)
            if shape is not None and len(shape) > 0:
                sizes.add(int(shape[0]))
        return BatchSize(sizes.pop() if len(sizes) == 1 else None)

    def begin(self, batch: Any) -> None:
        """Keeps what undoing the step needs."""
        self._steps.begin(batch)

    def run(self, batch: Any) -> Any:
        """Trains on a batch; the logs."""
        return self._steps.run(batch)

    def done(self) -> None:
        """The batch has been trained on."""
        self._steps.forget()

    def settle(self) -> None:
        """Waits until the last step has been made."""
        self._steps.settle()

    def failure(self, error: BaseException) -> OutOfMemory | None:
        """What ran out, if that is what the error says."""
        found = oom.recognise(error)
        if found is not None:
            oom.clear(error)
        return found

    def roll_back(self) -> None:
        """Everything as it was before the step; raises BrokenUpdate where that isn't possible."""
        self._steps.roll_back()
        oom.release()

    # Settings.

    def put_on(self, settings: Settings) -> None:
        """Runs steps by these settings from now on.

        Raises:
            BadInput: the model can't; it is then as it was without any.
        """
        # One number of samples serves batches of all sizes, so that a smaller one at the end changes nothing.
        settings = replace(settings, micro_batches=2 if settings.micro_batch_size else 1)
        if settings == self._settings:
            return
        try:
            with self.filled():
                if self._fitted is None:
                    self._fitted = FittedModel(settings, self.model, self._approximate)
                else:
                    self._fitted.change(settings)
            self._settings = settings
        except BaseException:
            self._settings = Settings()
            raise
        finally:
            self._steps.rebuild()

    @property
    def settings(self) -> Settings:
        """In use."""
        return self._settings

    @property
    def differences(self) -> str:
        """What differs from the plain step, in words."""
        return "" if self._fitted is None else self._fitted.approximate

    @property
    def mixes_samples(self) -> bool:
        """Whether parts of a batch don't compute what the whole does."""
        return bool(with_statistics(self.model))

    @property
    def loops_slowly(self) -> bool:
        """Whether parts of a batch take many times as long as the whole."""
        return loop_factor(self.model, on_host=self.device_name == "host") > 1

    def why_not_split(self) -> str:
        """Why batches can't be split; "" where they can."""
        from memfit.adapters.keras.fitting.fitted import check_split

        try:
            kept = self.model.__dict__.pop("train_step", None)
            try:
                check_split(self.model, approximate=self._approximate)
            finally:
                if kept is not None:
                    self.model.__dict__["train_step"] = kept
        except BadModel as error:
            return str(error)
        return ""

    def stronger_moves(self) -> list[dict[str, Any]]:
        """Settings to put on one after the other: all that can be recomputed is."""
        try:
            from memfit.adapters.keras.fitting.units import units

            paths = tuple(unit.path for unit in units(self.model))
        except (NotImplementedError, ImportError, BadModel, ValueError, TypeError, AttributeError):
            return []
        return [{"checkpoint": paths}] if paths else []

    def without_settings(self) -> None:
        """The plain model, for what looks at it."""
        self.put_on(Settings())

    # To disk and back.

    def identity(self, batch: Any) -> tuple[object, ...]:
        """What a finding about memory depends on."""
        # A batch without sample weights is the same whether it says so or not.
        parts = [part for part in keras.tree.flatten(batch) if part is not None]
        shapes = [tuple(getattr(part, "shape", ()))[1:] for part in parts]
        return (
            keras.backend.backend(),
            type(self.model).__name__,
            self.model.count_params(),
            self.device_name,
            self.model.dtype_policy.name,
            bool(self.model.jit_compile),
            *shapes,
        )

    @property
    def device_name(self) -> str:
        """The kind of accelerator, or "host"."""
        return device_name()

    @property
    def where(self) -> Where:
        """Whose memory the steps take."""
        return Where.HOST if self.device_name == "host" else Where.DEVICE

    def write(self, directory: Path, progress: dict[str, Any]) -> None:
        """Writes all that a resume needs.

        Args:
            directory: of the checkpoint.
            progress: plain data and arrays.
        """
        self._steps.settle()
        variables.write(directory / _VARIABLES, self.model, self._steps.values())
        plain = Plain()
        states = [] if self._states is None else self._states.to_json(plain)
        content = {"progress": plain.encode(progress, "progress"), "callbacks": states}
        write_arrays(
            directory / _ARRAYS,
            [
                Entry(name, array.shape, array.dtype.name, lambda array=array: array)  # type: ignore[misc]
                for name, array in plain.arrays.items()
            ],
        )
        (directory / _PROGRESS).write_text(json.dumps(content), encoding="utf-8")

    def read(self, directory: Path) -> "Resumed":
        """What `write` wrote, but for the variables, which `Resumed.load_variables` loads."""
        try:
            content = json.loads(read_plain(directory / _PROGRESS))
            file = ArrayFile(directory / _ARRAYS)
            plain = Plain({name: file.read(name) for name in file.names()})
            resumed = Resumed(directory, plain.decode(content["progress"]), content["callbacks"], plain)
            problem = mismatch(resumed.progress, _Progress)
            if problem:
                raise BadCheckpoint(f"{directory} holds no checkpoint of a fit: {problem}")
            for name in ("random", "now"):
                randomness.check(resumed.progress["data"][name])
            self.watch_callbacks()
            if self._states is not None:
                self._states.check(resumed.callbacks, plain)
            return resumed
        except (BadCheckpoint, MemoryError):
            raise
        except Exception as error:
            raise BadCheckpoint(f"{directory} holds no checkpoint of a fit: {error!r}") from error

    @property
    def is_built(self) -> bool:
        """Whether all variables are there to be loaded."""
        return variables.is_built(self.model)

    def build_early(self) -> None:
        """Makes all variables before the first batch, where a batch can be looked at without being lost."""
        if not self.is_built and self._iterator is not None and not self.data.is_generator:
            self.model._symbolic_build(iterator=self._iterator)
            self._iterator.reset()

    def build(self, batch: Any) -> None:
        """Makes all variables."""
        if not self._is_built:
            if not self.is_built:
                self.model._symbolic_build(data_batch=batch)
            self._is_built = True

    def load_variables(self, resumed: "Resumed", *, in_epoch: bool) -> None:
        """Gives the variables the stored values.

        Args:
            resumed: from `read`.
            in_epoch: whether an epoch is in progress, with its metrics.
        """
        groups = variables.GROUPS if in_epoch else variables.GROUPS[:-1]
        with self.filled():
            variables.read(resumed.directory / _VARIABLES, self.model, groups)

    def watch_callbacks(self) -> None:
        """What callbacks change from now on is their state."""
        if self._states is None:
            self._states = CallbackStates(self._callbacks)

    def load_callbacks(self, resumed: "Resumed") -> None:
        """Gives callbacks what they had found out."""
        self.watch_callbacks()
        if self._states is not None:
            self._states.load(resumed.callbacks, resumed.plain)

    @contextmanager
    def filled(self) -> Iterator[None]:
        """The variables have their values inside, also within an epoch on JAX; changed ones count afterwards."""
        is_empty = self._steps.values() is not None
        if is_empty:
            self._steps.fill()
        try:
            yield
        finally:
            if is_empty:
                self._steps.load()

    def give_back(self) -> None:
        """The variables have their values again, also where the step in progress failed."""
        self._steps.give_back()

    @property
    def is_installed(self) -> bool:
        """Whether Keras trains by these steps."""
        return self._steps.is_installed

    def metrics(self) -> dict[str, Any]:
        """The metrics so far, as logs."""
        with self.filled():
            return {name: float(value) for name, value in self.model.get_metrics_result().items()}

    def describe(self) -> str:
        """The model's state in a few words."""
        groups = variables.grouped(self.model)
        held = sum(variables.size_bytes(group) for group in groups.values())
        return f"the variables of {self.model.name!r} and its optimizer take {format_size(held)}"

    def close(self) -> None:
        """The model as it was without a guard; weights and the optimizer's state are kept."""
        self._steps.settle()
        self._steps.remove()
        if self._fitted is not None:
            self._fitted.undo()
        self.data.close()


class _Position(TypedDict):
    """Where a fit is in its data."""

    seed: Count
    random: dict[str, Any]
    now: dict[str, Any]
    epoch: Count
    position: int
    stream: Any


class _Progress(TypedDict):
    """What `write` is given."""

    update: Count
    epoch: Count
    batch: Count
    stopped: bool
    attempts: dict[str, Any] | None
    data: _Position
    history: dict[str, list[Any]]
    epochs: list[int]


class Resumed:
    """What a checkpoint says.

    Args:
        directory: of the checkpoint.
        progress: what was written.
        callbacks: their states.
        plain: with the arrays.
    """

    def __init__(self, directory: Path, progress: dict[str, Any], callbacks: list[Any], plain: Plain) -> None:
        self.directory = directory
        self.progress = progress
        self.callbacks = callbacks
        self.plain = plain


def check_fit(model: Any) -> None:
    """Refuses what can't be trained by `fit`."""
    if not isinstance(model, keras.Model):
        raise BadModel(
            f"a compiled keras.Model was expected, but {type(model).__name__} was given. For PyTorch modules there is "
            "memfit.Guard."
        )
    check_model(model, training=True)


def device_name() -> str:
    """The kind of accelerator that Keras uses, or "host"."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return "host" if jax.default_backend() == "cpu" else str(jax.local_devices()[0].device_kind)
    if backend == "tensorflow":
        import tensorflow as tf

        return "host" if not tf.config.list_physical_devices("GPU") else "gpu"
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "host"

"""A `fit` of Keras as a guard drives it: steps that can be undone, settings put on and off, state to disk and back."""

import itertools
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import keras

from memfit.catalogue.host import resident_bytes
from memfit.core import tensor_file
from memfit.core.adapter import GuardedLoop
from memfit.core.errors import BadInput, BadModel
from memfit.core.guarding import (
    NEVER,
    BadCheckpoint,
    BatchSize,
    Blame,
    CannotFit,
    Fallbacks,
    GuardOptions,
    MemoryFailure,
    Splitting,
)
from memfit.core.oom import caught
from memfit.core.plain_files import read_plain
from memfit.core.plan import Plan
from memfit.core.settings import Settings
from memfit.core.state_tree import Decoder, Encoder
from memfit.core.tensor_file import TensorFile, array_entry
from memfit.core.typed_data import Count, mismatch
from memfit.core.units import format_size
from memfit.frameworks.keras import internals
from memfit.frameworks.keras.apply.fitted import FittedModel, check_split, with_statistics
from memfit.frameworks.keras.apply.units import units
from memfit.frameworks.keras.guard import variables
from memfit.frameworks.keras.guard.callbacks import CallbackStates
from memfit.frameworks.keras.guard.data import Data, restore_random
from memfit.frameworks.keras.guard.steps import make_steps
from memfit.frameworks.keras.model import check_known, check_model, has_call, number_of, size_of
from memfit.frameworks.keras.trace.planning import loop_factor

_log = logging.getLogger("memfit")

_GROW_AFTER = 1000
_VARIABLES, _ARRAYS, _PROGRESS = "variables.safetensors", "arrays.safetensors", "progress.json"


class KerasLoop(GuardedLoop):
    """One call of `fit`, or batches that a loop of the user's own hands over.

    Args:
        model: compiled.
        each: called with each batch that Keras draws; it trains on it and gives the logs.
        options: of the guard.
        is_ordered: whether the order of the data has to be one that can be come back to.
        iterator: Keras's iterator of epochs, or None.
        callbacks: Keras's, without memfit's own.
        num_epochs: of the `fit`; None: there is no `fit`.
    """

    learns_from_start = False

    def __init__(
        self,
        model: Any,
        each: Callable[[Any], Any],
        *,
        options: GuardOptions | None = None,
        is_ordered: bool = False,
        iterator: Any = None,
        callbacks: Sequence[Any] = (),
        num_epochs: int | None = None,
    ) -> None:
        check_fit(model)
        self.model = self.owner = model
        self.model_name = type(model).__name__
        self.data = Data(iterator, is_ordered=is_ordered)
        self._each = each
        self._options = options or GuardOptions()
        self._iterator = iterator
        self._callbacks = list(callbacks)
        self._num_epochs = num_epochs
        self._states: CallbackStates | None = None
        self._epoch = self._batch = self._skip = 0
        # The epoch that has just ended, with its logs, and whether the next batch is the first of an epoch.
        self._ended: tuple[int, dict[str, Any]] | None = None
        self._at_end = False
        self._resumed: Resumed | None = None
        self._position: dict[str, Any] = {}
        self.batch = None
        self.logs: Any = None
        """Of the last batch."""
        self._open_steps()

    def _open_steps(self) -> None:
        self._fitted = FittedModel(Settings(), self.model, self._options.approximate)
        self._wanted = Settings()
        self._is_built = self._has_begun = False
        self._steps = make_steps(self.model, self._each)
        self._steps.install()

    def put_back(self) -> None:
        """The steps are in place, whatever happened to the model since the last batch."""
        if not self._steps.is_installed:
            self.close()
            self.model.make_train_function()
            self._open_steps()

    # One batch.

    def size_of(self, batch: Any) -> BatchSize:
        """Samples of a batch; None where its arrays don't agree on it."""
        shapes = (getattr(part, "shape", None) for part in keras.tree.flatten(batch))
        sizes = {int(shape[0]) for shape in shapes if shape is not None and len(shape) > 0}
        return BatchSize(sizes.pop() if len(sizes) == 1 else None)

    def enter(self, batch: Any, restore_settings: Callable[[Any, Callable[[Settings], None]], None]) -> bool:
        """Whether a batch is to be trained on: those before a resume aren't, and `logs` is what they gave.

        `restore_settings` has the settings put on that a checkpoint was written with.
        """
        self.batch = batch
        if self._resumed is not None:
            self._load(batch, restore_settings)
        if self._batch < self._skip:
            self._batch += 1
            self.data.count()
            if self._batch == self._skip:
                self.data.caught_up(self._position)
            return False
        self.watch_callbacks()
        self._build(batch)
        return True

    @property
    def is_caught_up(self) -> bool:
        """Whether the batch that was passed over was the last such one."""
        return self._batch == self._skip

    def attempt(self, settings_of: Callable[[Any], Settings], *, again: bool) -> MemoryFailure | None:
        """Trains on the batch once, by these settings."""
        self._has_begun, self.happened = False, None

        def run() -> None:
            self.put_on(settings_of(self.batch))
            self._steps.begin(self.batch)
            self._has_begun = True
            self.logs = self._steps.run(self.batch)
            if again:
                # Errors of the step itself may come late.
                self._steps.settle()

        failure = caught(run)
        if failure is not None:
            return failure
        self._steps.forget()
        self._has_begun = False
        self._batch += 1
        self._at_end, self.happened = False, True
        self.data.count()
        return None

    def roll_back(self) -> None:
        """Everything as it was before the step; raises BrokenUpdate where that isn't possible."""
        if self._has_begun:
            self._steps.roll_back()
            self._has_begun = False
        if "torch" in sys.modules:
            from memfit.frameworks.torch.oom import release
        else:
            from memfit.core.heap import release
        release()

    def mark(self) -> Any:
        """Loops of the user's own are saved at their end; a `fit` that was broken off isn't."""
        return True if self._num_epochs is None else None

    def is_at(self, mark: Any) -> bool:
        """Not in the middle of a step."""
        return not self._has_begun

    def blame(self, error: Exception, *, again: bool) -> Blame | None:
        """Parts, where the step has begun or was to be split; else moves."""
        if not isinstance(error, BadInput):
            return None
        return Blame.PARTS if self._has_begun or self._wanted.micro_batch_size else Blame.MOVES

    # Epochs.

    def epoch_begins(self, epoch: int) -> None:
        """Before the first batch of an epoch is drawn."""
        self._epoch, self._batch, self._skip = epoch, 0, 0
        if self._resumed is not None:
            self._skip = int(self._resumed.progress["batch"])
            self.data.go_to(self._resumed.progress["data"], self._skip)
        self.data.begin_epoch(epoch)

    def epoch_ends(self, epoch: int, logs: dict[str, Any]) -> bool:
        """After validation; whether it was the last epoch."""
        self._ended = epoch, logs
        self.data.end_epoch()
        self._epoch, self._batch, self._at_end = epoch + 1, 0, True
        return self._epoch >= (self._num_epochs or 0) or bool(self.model.stop_training)

    def train_ends(self) -> None:
        """The fit is over."""
        if self._resumed is not None:
            # Nothing was left to do.
            self._load_history(self._resumed)

    # Settings.

    def put_on(self, settings: Settings) -> None:
        """Runs steps by these settings from now on.

        Raises:
            BadInput: the model can't; it is then as it was without any.
        """
        # One number of samples serves batches of all sizes, so that a smaller one at the end changes nothing.
        settings = self._wanted = replace(settings, micro_batches=2 if settings.micro_batch_size else 1)
        if settings == self._fitted.settings:
            return
        try:
            with self.filled():
                self._fitted.change(settings)
        finally:
            self._steps.rebuild()

    @property
    def settings(self) -> Settings:
        """In use."""
        return self._fitted.settings

    def differences(self, settings: Settings) -> str:
        """What differs from the plain step, in words."""
        return self._fitted.approximate

    def fallbacks(self) -> Fallbacks:
        """Recomputation of all that can be recomputed; where parts differ from the whole or take much longer, first."""
        try:
            paths = tuple(unit.path for unit in units(self.model))
        except (NotImplementedError, ImportError, BadModel, ValueError, TypeError, AttributeError):
            paths = ()
        on_host = device_name() == "host"
        return Fallbacks(
            stronger=({"checkpoint": paths},) if paths else (),
            whole_first=bool(with_statistics(self.model)) or loop_factor(self.model, on_host=on_host) > 1,
            # A larger micro-batch means a step that is traced or compiled again. On the host it is never tried: a
            # process that takes too much there may be ended by the system, which nobody can undo.
            grow_after=NEVER if on_host else _GROW_AFTER,
            one_size=True,
        )

    def why_not_split(self) -> str:
        """Why batches can't be split; "" where they can."""
        try:
            check_split(self.model, approximate=self._options.approximate)
        except BadModel as error:
            return str(error)
        return ""

    def splitting(self) -> Splitting:
        """Losses of parts add up by their samples."""
        return Splitting(refused=self.why_not_split())

    def usable_bytes(self, budget_bytes: int, share: float) -> int:
        """What is left of a budget: on the host it is for the whole process, which holds a part of it already."""
        held = (resident_bytes() or 0) if device_name() == "host" else 0
        if held >= budget_bytes:
            raise CannotFit(
                f"the process holds {format_size(held)} before the first step, and its budget, which is for all that "
                f"it holds, is {format_size(budget_bytes)}. Give a larger budget."
            )
        return int((budget_bytes - held) * share)

    def plan(self, make_plan: Callable[..., Plan], budget_bytes: int) -> Settings:
        """The planner's settings for the batch."""
        _log.warning(
            "memfit is planning for %s before the first step, which takes longer for it", format_size(budget_bytes)
        )
        allow = ["exact", "rounding"] + (["approximate"] if self._options.approximate else [])
        device = "cpu" if device_name() == "host" else None
        with self.filled():
            return make_plan(self.model, batch=self.batch, device=device, budget=budget_bytes, allow=allow).settings

    def explain(self, failure: MemoryFailure, settings: Settings, why_whole: str) -> str:
        """What was tried, what the model's state takes, what to do."""
        tried = f"micro-batches of {settings.micro_batch_size}" if settings.micro_batch_size else "whole batches"
        if settings.checkpoint:
            tried += ", with recomputation of everything that can be recomputed"
        asked = f" {format_size(failure.requested_bytes)} were asked for." if failure.requested_bytes else ""
        held = sum(size_of(one) for group in variables.grouped(self.model).values() for one in group)
        why = f" Batches aren't split: {why_whole}" if why_whole else ""
        return (
            f"memory ran out, and nothing is left to try. Tried last: {tried}.{asked} The variables of "
            f"{self.model.name!r} and its optimizer take {format_size(held)}.{why} The model is as it was before the "
            "step. Use a smaller model or input, a lower precision (keras.mixed_precision), or more memory; "
            f"memfit.estimate says where it goes. [{failure.text}]"
        )

    # To disk and back.

    def identity(self, batch: Any, host_bytes: int | None) -> tuple[object, ...]:
        """What a finding about memory depends on."""
        # A batch without sample weights is the same whether it says so or not.
        parts = [part for part in keras.tree.flatten(batch) if part is not None]
        shapes = [tuple(getattr(part, "shape", ()))[1:] for part in parts]
        return (
            keras.backend.backend(),
            type(self.model).__name__,
            sum(map(number_of, self.model.weights)),
            device_name(),
            self.model.dtype_policy.name,
            bool(self.model.jit_compile),
            *shapes,
            host_bytes,
            self._options.approximate,
        )

    def write_state(self, directory: Path, progress: dict[str, Any]) -> None:
        """Writes all that a resume needs: the guard's progress, the position in the data, Keras's history."""
        progress = {
            **progress,
            "epoch": self._epoch,
            "batch": self._batch,
            "stopped": self._at_end and bool(self.model.stop_training),
            "data": self.data.position(at_end=self._at_end),
            **history_of(self.model, self._ended),
        }
        self._steps.settle()
        variables.write(directory / _VARIABLES, self.model, self._steps.values())
        encoder = Encoder()
        states = [] if self._states is None else self._states.to_json(encoder)
        content = {"progress": encoder.encode(progress, "progress"), "callbacks": states}
        tensor_file.write(directory / _ARRAYS, itertools.starmap(array_entry, encoder.tensors.items()))
        (directory / _PROGRESS).write_text(json.dumps(content), encoding="utf-8")

    def read_state(self, directory: Path, check: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """What `write_state` wrote; variables that aren't there yet get their values with the first batch.

        `check` may refuse the guard's progress, before anything is changed.
        """
        try:
            content = json.loads(read_plain(directory / _PROGRESS))
            decoder = Decoder(TensorFile(directory / _ARRAYS))
            resumed = Resumed(directory, decoder.decode(content["progress"]), content["callbacks"], decoder)
            problem = mismatch(resumed.progress, _Progress)
            if problem:
                raise BadCheckpoint(f"{directory} holds no checkpoint of a fit: {problem}")
            check(resumed.progress)
            for name in ("random", "now"):
                restore_random(resumed.progress["data"][name], rehearse=True)
            self.watch_callbacks().check(resumed.callbacks, decoder)
        except (BadCheckpoint, MemoryError):
            raise
        except Exception as error:
            raise BadCheckpoint(f"{directory} holds no checkpoint of a fit: {error!r}") from error
        if not variables.is_built(self.model) and self._iterator is not None and not self.data.is_generator:
            # A batch can be looked at without being lost.
            self._make_variables(iterator=self._iterator)
            self._iterator.reset()
        self._resumed, self._epoch = resumed, int(resumed.progress["epoch"])
        if self._num_epochs is not None:
            # Keras begins with this epoch, as after its own BackupAndRestore.
            internals.begin_at(self.model, max(self._num_epochs, self._epoch) if self._is_over else self._epoch)
        if variables.is_built(self.model):
            self._load_variables(resumed, in_epoch=False)
        elif self._is_over:
            raise BadModel(
                f"the training in {directory.parent} is over, and the model {self.model.name!r} has no variables yet "
                "to load the result into. Build it first: call it on one batch."
            )
        self.watch_callbacks().load(resumed.callbacks, resumed.decoder)
        return resumed.progress

    @property
    def _is_over(self) -> bool:
        """Whether nothing is left of the fit that was resumed."""
        if self._resumed is None or self._num_epochs is None:
            return False
        return self._epoch >= self._num_epochs or bool(self._resumed.progress["stopped"])

    def resumed(self, directory: Path) -> list[str]:
        """Where training goes on, and what is taken for granted about the data."""
        assert self._resumed is not None
        progress = self._resumed.progress
        if self._is_over:
            return [f"resumed from {directory}: training was over"]
        texts = [f"resumed from {directory}: epoch {self._epoch + 1}, batch {int(progress['batch']) + 1}"]
        if self.data.is_generator:
            texts.append("the data come from a generator: batches already trained on are drawn and skipped")
        if self.data.is_tf_dataset:
            texts.append(
                "the data are a tf.data.Dataset: its batches are assumed to come in the same order again; give "
                "shuffle() a seed and reshuffle_each_iteration=False if it shuffles"
            )
        return texts

    def _load(self, batch: Any, restore_settings: Callable[[Any, Callable[[Settings], None]], None]) -> None:
        """At the first batch after a resume, when all other callbacks have had their say."""
        resumed, self._resumed = self._resumed, None
        assert resumed is not None
        self._build(batch)
        if self._skip:
            # As at the time of the checkpoint: settings may come with variables of their own.
            restore_settings(batch, self.put_on)
        # At the beginning of an epoch metrics begin anew.
        self._load_variables(resumed, in_epoch=bool(self._skip))
        self.watch_callbacks().load(resumed.callbacks, resumed.decoder)
        self._load_history(resumed)
        self._position = resumed.progress["data"]
        if self._num_epochs is None:
            self.data.go_on(self._position)
        if self._skip:
            with self.filled():
                self.logs = {name: float(value) for name, value in self.model.get_metrics_result().items()}

    def _load_history(self, resumed: "Resumed") -> None:
        history: Any = getattr(self.model, "history", None)
        if hasattr(history, "history"):
            history.history.update({name: list(values) for name, values in resumed.progress["history"].items()})
            history.epoch = list(resumed.progress["epochs"])

    def _build(self, batch: Any) -> None:
        if not self._is_built:
            if not variables.is_built(self.model):
                self._make_variables(data_batch=batch)
            self._is_built = True

    def _make_variables(self, **source: Any) -> None:
        """Makes what the first step would make, of a batch or of the iterator that has one."""
        if has_call(self.model):
            internals.symbolic_build(self.model, **source)
        elif self.model.optimizer is not None:
            self.model.optimizer.build(self.model.trainable_variables)

    def _load_variables(self, resumed: "Resumed", *, in_epoch: bool) -> None:
        """Gives the variables the stored values; metrics only where an epoch is in progress."""
        groups = variables.GROUPS if in_epoch else variables.GROUPS[:-1]
        with self.filled():
            variables.read(resumed.directory / _VARIABLES, self.model, groups)

    def watch_callbacks(self) -> CallbackStates:
        """What callbacks change from now on is their state."""
        if self._states is None:
            self._states = CallbackStates(self._callbacks)
        return self._states

    @contextmanager
    def filled(self) -> Iterator[None]:
        """The variables have their values inside, also within an epoch on JAX; changed ones count afterwards."""
        if self._steps.values() is None:
            yield
            return
        self._steps.fill()
        try:
            yield
        finally:
            self._steps.load()

    def give_back(self) -> None:
        """The variables have their values again, also where the step in progress failed."""
        self._steps.give_back()

    def close(self) -> None:
        """The model as it was without a guard; weights and the optimizer's state are kept."""
        self._steps.settle()
        self._steps.remove()
        self._fitted.undo()
        self.data.close()
        internals.begin_at(self.model, None)


class _DataPosition(TypedDict):
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
    asked: Any
    data: _DataPosition
    history: dict[str, list[Any]]
    epochs: list[int]


@dataclass(frozen=True, slots=True)
class Resumed:
    """The content of a checkpoint that is being resumed from."""

    directory: Path
    progress: dict[str, Any]
    callbacks: list[Any]
    decoder: Decoder


def history_of(model: Any, ended: tuple[int, dict[str, Any]] | None) -> dict[str, Any]:
    """Keras's History as plain data, with the epoch that has just ended, of which it may not have heard yet."""
    history = getattr(model, "history", None)
    epochs = [int(epoch) for epoch in getattr(history, "epoch", [])]
    logs = getattr(history, "history", None) or {}
    plain = {str(name): [float(value) for value in values] for name, values in logs.items()}
    if ended is not None and ended[0] not in epochs:
        epochs.append(ended[0])
        for name, value in ended[1].items():
            plain.setdefault(str(name), []).append(float(value))
    return {"history": plain, "epochs": epochs}


def check_fit(model: Any) -> None:
    """Refuses what can't be trained by `fit`."""
    check_model(model, training=True)
    check_known(model)


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

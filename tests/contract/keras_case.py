"""The contract's small network in Keras, on the backend that Keras has in this process."""

from contextlib import contextmanager

import keras
import numpy as np

import memfit
from tests.contract import oom_errors
from tests.contract.case import HIDDEN, INPUTS, OUTPUTS, TOO_MANY_ELEMENTS, Case, first_weights

BACKEND = keras.backend.backend()


class KerasCase(Case):
    layout_slack = 0.03 if BACKEND == "jax" else 0.0
    # Keras counts updates in an int64 or int32, and has the learning rate as a variable.
    counter_bytes = 16
    misspelt_job = ("keras:VGG61", "VGG16")

    def __init__(self, optimizer="adam", *, broken=False):
        super().__init__(optimizer, broken=broken)
        hidden = keras.layers.Dense(HIDDEN, activation=self.activation, name="hidden")
        last = keras.layers.Dense(OUTPUTS, name="last")
        self.model = keras.Sequential([keras.Input((INPUTS,)), hidden, last], name="net")
        self.model.set_weights(first_weights())
        adam = optimizer == "adam"
        self.model.compile(
            keras.optimizers.Adam() if adam else keras.optimizers.SGD(0.1, momentum=0.9),
            self.broken_loss if broken else self.loss,
            # XLA in TensorFlow compiles for seconds, and torch.compile for longer.
            jit_compile=BACKEND == "jax",
        )

    def activation(self, values):
        """ReLU; asks for memory that isn't there where the samples are more than there is room for."""
        rows = keras.ops.shape(values)[0]
        if self.room is not None and rows is not None:
            values += self.shortage(rows)
        return keras.ops.relu(values)

    def shortage(self, rows):
        if BACKEND == "tensorflow":
            # How many samples there are may be unknown until the graph is run.
            return tensorflow.reshape(tensorflow.numpy_function(self.refuse, [rows], "float32"), ())
        if self.is_too_much(rows):
            ask_for_too_much()
        return 0.0

    def refuse(self, rows):
        """What TensorFlow says ten seconds after it was asked for memory that isn't there."""
        if self.is_too_much(rows):
            # It makes a ResourceExhaustedError of this.
            raise MemoryError(f"OOM when allocating tensor with shape[{TOO_MANY_ELEMENTS}] and type float on CPU:0")
        return np.float32(0)

    def loss(self, targets, outputs):
        self.raise_fault()
        return keras.ops.mean((targets - outputs) ** 2, axis=-1)

    @staticmethod
    def broken_loss(targets, outputs):
        raise KeyError("broken on purpose")

    def asked(self, batch):
        return (self.model,), {"batch": batch}

    def asked_for_inference(self, inputs):
        return (self.model,), {"batch": inputs, "mode": "inference"}

    def estimate_narrow(self, device):
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy("bfloat16")
        try:
            return type(self)().estimate(device)
        finally:
            keras.config.set_dtype_policy(before)

    def plain(self):
        return lambda batch: float(self.model.train_on_batch(*batch))

    def fitted(self, plan):
        plan.apply(self.model)
        return self.plain()

    @contextmanager
    def guarded(self):
        with memfit.Guard(self.model, plan=None, options=memfit.GuardOptions(remember=False)) as guard:
            yield lambda batch: float(guard.train_on_batch(*batch))

    def make_bad_guard(self):
        memfit.Guard(self.model, options=memfit.GuardOptions(micro_batch_size=0))

    def weights(self):
        return [np.array(value) for value in self.model.get_weights()]

    def numbers(self):
        values = [*self.model.variables, *self.model.optimizer.variables]
        return [np.asarray(keras.ops.convert_to_numpy(value)).tobytes() for value in values]

    def identities(self):
        variables = [*self.model.variables, *self.model.optimizer.variables]
        return [*map(id, variables), self.model.optimizer.built, self.model.train_function, sorted(vars(self.model))]

    def oom_errors(self):
        return [*getattr(oom_errors, f"of_{BACKEND}")(), *oom_errors.of_python()]

    def impostors(self):
        return getattr(oom_errors, f"{BACKEND}_impostors")()


if BACKEND == "tensorflow":
    import tensorflow

    KerasCase.out_of_memory = tensorflow.errors.ResourceExhaustedError
elif BACKEND == "jax":
    import jax

    KerasCase.out_of_memory = oom_errors.jax_error()

    def ask_for_too_much():
        with jax.ensure_compile_time_eval():
            jax.numpy.zeros(TOO_MANY_ELEMENTS, "float32")

else:
    import torch

    KerasCase.out_of_memory = RuntimeError

    def ask_for_too_much():
        torch.empty(TOO_MANY_ELEMENTS)

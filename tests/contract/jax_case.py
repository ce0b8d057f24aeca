"""The contract's small network in JAX, with an optimizer of optax."""

from contextlib import contextmanager
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

import memfit
from tests.contract import oom_errors
from tests.contract.case import TOO_MANY_ELEMENTS, Case, first_weights

NAMES = ("hidden.kernel", "hidden.bias", "last.kernel", "last.bias")


class JaxCase(Case):
    lacks: ClassVar = {
        "test_a_named_model_becomes_a_job": "JAX has no collection of models of its own",
        "test_a_misspelt_name_is_answered_with_the_right_one": "JAX has no collection of models of its own",
    }
    layout_slack = 0.03
    # optax counts updates.
    counter_bytes = 8
    out_of_memory = oom_errors.jax_error()

    def __init__(self, optimizer="adam", *, broken=False):
        super().__init__(optimizer, broken=broken)
        self.params = dict(zip(NAMES, map(jnp.asarray, first_weights()), strict=True))
        self.optimizer = optax.adam(1e-3) if optimizer == "adam" else optax.sgd(0.1, momentum=0.9)
        self.state: Any = self.optimizer.init(self.params)
        self.used_loss = self.broken_loss if broken else self.loss
        self.update = jax.jit(self.own_update, donate_argnums=(0, 1))

    def forward(self, params, inputs):
        with jax.named_scope("hidden"):
            hidden = jax.nn.relu(inputs @ params["hidden.kernel"] + params["hidden.bias"])
        with jax.named_scope("last"):
            return hidden @ params["last.kernel"] + params["last.bias"]

    def loss(self, params, batch):
        inputs, targets = batch
        self.raise_fault()
        if self.is_too_much(inputs.shape[0]):
            with jax.ensure_compile_time_eval():
                jnp.zeros(TOO_MANY_ELEMENTS, jnp.float32)
        return jnp.mean((self.forward(params, inputs) - targets) ** 2)

    @staticmethod
    def broken_loss(params, batch):
        raise KeyError("broken on purpose")

    def own_update(self, params, state, batch):
        value, gradients = jax.value_and_grad(self.used_loss)(params, batch)
        changes, state = self.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, value

    def asked(self, batch):
        return (self.update, self.params, self.state, batch), {}

    def asked_to_plan(self, batch):
        return (self.used_loss, self.params, batch), {"optimizer": self.optimizer}

    def asked_for_inference(self, inputs):
        return (jax.jit(self.forward), self.params, inputs), {"mode": "inference"}

    def estimate_narrow(self, device):
        self.params = {name: value.astype(jnp.bfloat16) for name, value in self.params.items()}
        self.state = self.optimizer.init(self.params)
        return self.estimate(device)

    def plain(self):
        return self._trained_by(self.update)

    def fitted(self, plan):
        return self._trained_by(plan.apply(self.used_loss, self.optimizer))

    @contextmanager
    def guarded(self):
        yield self._trained_by(memfit.jax.train_step(self.used_loss, self.optimizer, guard=True))

    def _trained_by(self, update):
        def step(batch):
            self.params, self.state, value = update(self.params, self.state, batch)
            return float(value)

        return step

    def make_bad_guard(self):
        memfit.jax.train_step(self.used_loss, self.optimizer, micro_batches=0, guard=True)

    def weights(self):
        return [np.array(self.params[name]) for name in NAMES]

    def numbers(self):
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((self.params, self.state))]

    def identities(self):
        return [(id(leaf), leaf.is_deleted()) for leaf in jax.tree.leaves((self.params, self.state))]

    def oom_errors(self):
        return [*oom_errors.of_jax(), *oom_errors.of_python()]

    def impostors(self):
        return oom_errors.jax_impostors()

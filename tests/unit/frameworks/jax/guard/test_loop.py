"""What a guard asks of a step of JAX; guarded training is in api/test_guarded_step.py."""

import numpy as np
import optax

from memfit.core.guarding import BatchSize
from memfit.core.settings import Settings
from memfit.frameworks.jax.guard.loop import JaxLoop


def test_a_loop_says_what_it_can():
    loop = JaxLoop(lambda params, batch: params["w"] * batch.mean(), optax.sgd(0.1), settings=Settings())

    assert loop.size_of(np.ones((6, 2))) == BatchSize(6)
    assert loop.size_of(3.0) == BatchSize(None)
    assert not loop.fallbacks().stronger
    assert not loop.splitting().refused
    assert loop.blame(ValueError(), again=True) is None

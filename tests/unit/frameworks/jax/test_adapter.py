import jax
import jax.numpy as jnp
import optax
import pytest

import memfit
from memfit import BadInput, PlanNotFound
from memfit.core.settings import Keeps, Settings
from memfit.core.units import MIB

PARAMS = [{"a": jax.ShapeDtypeStruct((32, 256), "float32"), "b": jax.ShapeDtypeStruct((256, 32), "float32")}] * 3
BATCH = (jax.ShapeDtypeStruct((512, 32), "float32"),) * 2


def layer(weights, x):
    hidden = jnp.tanh(x @ weights["a"])
    return x + jax.nn.gelu(hidden * jax.nn.sigmoid(hidden)) @ weights["b"]


def loss(params, batch):
    x, y = batch
    for weights in params:
        x = memfit.jax.block(layer)(weights, x)
    return jnp.mean((x - y) ** 2)


def plan(budget, **options):
    options = {
        "optimizer": optax.adam(1e-3),
        "device": "cpu",
        "budget": budget,
        "options": memfit.PlanOptions(measure=False),
        **options,
    }
    return memfit.plan(loss, PARAMS, BATCH, **options)


def test_a_step_that_fits_is_left_as_it_is():
    found = plan("1GiB")
    assert found.settings == Settings() and found.framework == "jax" and found.batch_size == 512


def test_parts_and_donation_make_it_fit():
    found = plan(5 * MIB)
    assert found.fits and found.settings.micro_batches > 1 and found.settings.donate
    assert found.keeps is Keeps.ROUNDING
    assert {move.name for move in found.moves} == {"micro-batch", "donate"}
    assert "jax.lax.scan" in found.code()


def test_exact_moves_recompute():
    found = plan(6 * MIB, allow=["exact"])
    assert found.fits and found.settings.checkpoint and found.settings.micro_batches == 1
    assert found.keeps is Keeps.EXACT


def test_where_nothing_fits_it_is_told():
    with pytest.raises(PlanNotFound, match=r"below the fixed cost of loss"):
        plan(1000)
    with pytest.raises(PlanNotFound, match=r"(?s)no plan fits `loss`.*Try to allow checkpoint"):
        plan(2 * MIB, allow=["-checkpoint", "-micro-batch"])


def test_a_loss_without_marks_says_how_to_mark():
    found = memfit.plan(
        lambda params, batch: jnp.mean((batch[0] @ params["a"]) ** 2),
        PARAMS[0],
        BATCH,
        optimizer=optax.sgd(0.1),
        device="t4",
    )
    assert any("memfit.jax.block" in one.reason for one in found.refused)
    assert found.seconds_after.seconds > 0


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("no optimizer was given", {"optimizer": None}),
        ("keep, auto or amp-bf16, but 'fp16' was given", {"precision": "fp16"}),
    ],
)
def test_bad_input_is_told(text, options):
    with pytest.raises(BadInput, match=text):
        plan("1GiB", **options)

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from memfit.core.device import Device, Kind, Origin
from memfit.core.plan import Footprint, Plan, Seconds
from memfit.core.settings import Settings
from memfit.frameworks.jax.apply.training import TrainStep
from memfit.reports.plan.code import format_code


def plan(settings):
    device = Device("cpu", "CPU", Kind.HOST, None, 1000, Origin.MEASURED)
    used = Footprint(1, 1, {})
    return Plan("loss", device, 10, 7, settings, (), used, used, Seconds(None), Seconds(None), framework="jax")


def mean(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) - y) ** 2)


@pytest.mark.parametrize(
    "settings",
    [Settings(micro_batches=3, micro_batch_size=3, donate=True), Settings(donate=True), Settings(precision="amp-bf16")],
    ids=["parts", "donated", "narrow"],
)
def test_the_program_does_what_the_plan_does(settings):
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(3, 2)).astype("float32")}
    batch = (rng.normal(size=(7, 3)).astype("float32"), rng.normal(size=(7, 2)).astype("float32"))
    optimizer = optax.sgd(0.1)
    names = {"loss": mean, "own_loss": mean, "optimizer": optimizer}
    exec(compile(format_code(plan(settings)), "plan", "exec"), names)
    ours = TrainStep(mean, optimizer, settings)
    expected = ours(params, ours.init(params), batch)
    found = names["step"](jax.tree.map(jnp.asarray, params), optimizer.init(params), batch)
    assert np.allclose(found[0]["w"], expected[0]["w"], rtol=1e-5)
    assert float(found[2]) == pytest.approx(float(expected[2]), rel=1e-5)


def test_recomputation_is_told_in_words():
    text = format_code(plan(Settings(checkpoint=("layer.0", "layer.1"))))
    assert "layer.0, layer.1. Put jax.checkpoint around" in text and "donate" not in text

import pytest

import memfit
from memfit import BadInput
from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import MissingDependency
from memfit.core.plan import Footprint, Plan, Seconds
from memfit.core.settings import Settings


def plan(framework):
    device = Device("cpu", "CPU", Kind.HOST, None, 1000, Origin.MEASURED)
    used = Footprint(1, 1, {})
    settings = Settings(micro_batches=3, donate=True)
    return Plan("loss", device, 10, 6, settings, (), used, used, Seconds(None), Seconds(None), framework=framework)


def loss(params, batch):
    return (params["w"] * batch).mean()


def test_a_step_is_made_by_numbers_or_by_a_plan():
    optax = pytest.importorskip("optax")
    step = memfit.jax.train_step(loss, optax.sgd(0.1), micro_batches=2, recompute=("layer.0",))
    assert step.settings == Settings(micro_batches=2, checkpoint=("layer.0",), donate=True)
    assert memfit.jax.train_step(loss, optax.sgd(0.1), plan=plan("jax")).settings.micro_batches == 3
    assert plan("jax").apply(loss, optax.sgd(0.1)).settings.micro_batches == 3


def test_a_guarded_step_keeps_what_it_is_given():
    optax = pytest.importorskip("optax")
    step = memfit.jax.train_step(loss, optax.sgd(0.1), guard=True, micro_batches=2)
    assert type(step).__name__ == "GuardedStep" and step.settings == Settings(micro_batches=2)


def test_a_block_is_marked():
    pytest.importorskip("jax")
    assert memfit.jax.block(loss, "name")({"w": 2.0}, __import__("numpy").ones(3)) == 2.0


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("give it alone", {"plan": plan("jax"), "micro_batches": 2}),
        ("the plan is one for torch", {"plan": plan("torch")}),
        ("from 1 up, but 0 was given", {"micro_batches": 0}),
        ("from 1 up, but True was given", {"micro_batches": True}),
    ],
)
def test_bad_input_is_told(text, options):
    pytest.importorskip("jax")
    with pytest.raises(BadInput, match=text):
        memfit.jax.train_step(loss, None, **options)


def test_without_jax_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("memfit.jax.find_spec", lambda name: None)
    for call in (lambda: memfit.jax.train_step(loss, None), lambda: memfit.jax.block(loss)):
        with pytest.raises(MissingDependency, match="pip install jax"):
            call()

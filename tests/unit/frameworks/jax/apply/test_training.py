import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from memfit.core.errors import BadBatch, BadInput, BadLoss, BadOptimizer
from memfit.core.settings import Settings, Weighting
from memfit.frameworks.jax.apply.marked import block
from memfit.frameworks.jax.apply.training import TrainStep, check_batch, look, resized

NUM, WIDTH = 13, 6


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def layer(weights, x):
    return x + jnp.tanh(x @ weights["inner"]) @ weights["outer"]


def mean(params, batch):
    x = batch["x"]
    for weights in params:
        x = block(layer)(weights, x)
    return jnp.mean((x - batch["y"]) ** 2)


def weighed(params, batch):
    x = batch["x"]
    for weights in params:
        x = block(layer)(weights, x)
    counts = batch["mask"].sum()
    return (((x - batch["y"]) ** 2).mean(-1) * batch["mask"]).sum() / counts, counts


def summed(params, batch):
    return mean(params, batch) * batch["x"].shape[0]


def around(params, batch):
    """The weights come from around the block, as those of modules do."""
    x = batch["x"]
    for weights in params:
        x = block(lambda x, weights=None, own=weights: layer(own, x), "layer")(x)
    return jnp.mean((x - batch["y"]) ** 2)


def make():
    rng = np.random.default_rng(3)
    params = [
        {"inner": rng.normal(size=(WIDTH, 9)) * 0.3, "outer": rng.normal(size=(9, WIDTH)) * 0.3} for _ in range(3)
    ]
    batch = {name: rng.normal(size=(NUM, WIDTH)) for name in ("x", "y")}
    # Some parts of the batch have nothing that counts.
    return params, batch | {"mask": np.array([1.0] * 3 + [0.0] * 6 + [1.0] * 4)}


def optimizer():
    schedule = optax.cosine_decay_schedule(1e-2, 10)
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule), optax.ema(0.9))


@functools.cache
def trained(loss, settings, num_steps=2):
    params, batch = make()
    step = TrainStep(loss, optimizer(), settings or Settings(donate=True))
    state = step.init(params)
    for _ in range(num_steps):
        params, state, value = step(params, state, batch)
    return params, state, value


def difference(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.max(np.abs(a - b)) / max(1e-12, np.max(np.abs(a)))) for a, b in pairs)


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        (mean, Settings(micro_batches=13, donate=True)),
        (mean, Settings(micro_batches=3, micro_batch_size=5)),
        (weighed, Settings(micro_batches=4)),
        (around, Settings(checkpoint=("layer.0", "layer.2"))),
        (around, Settings(micro_batches=2, checkpoint=("layer.1",), donate=True)),
    ],
    ids=["samples", "unequal", "weights", "recomputed", "both"],
)
def test_every_setting_trains_as_the_plain_step_does(loss, settings):
    assert difference(trained(loss, Settings()), trained(loss, settings)) < 1e-11


def test_gradients_of_parts_equal_those_of_the_batch():
    params, batch = make()
    whole = jax.grad(mean)(params, batch)
    step = TrainStep(mean, optax.sgd(1.0), Settings(micro_batches=4))
    after, _, value = step(params, step.init(params), batch)
    found = jax.tree.map(lambda old, new: old - new, params, after)
    assert difference(whole, found) < 1e-12
    assert abs(float(value) - float(mean(params, batch))) < 1e-12


def test_a_sum_adds_up():
    params, batch = make()
    whole = float(summed(params, batch))
    values = {}
    for kind in ("sum", "samples"):
        step = TrainStep(summed, optax.sgd(1.0), Settings(micro_batches=4, weighting=Weighting(kind)))
        values[kind] = float(step(params, step.init(params), batch)[2])
    assert values["sum"] == pytest.approx(whole, rel=1e-12)
    # As a mean it would not be: the test can tell.
    assert values["samples"] < whole / 2


def compiled_bytes(settings):
    params, batch = make()
    step = TrainStep(mean, optax.sgd(1.0), settings)
    function, arguments, donated = step.to_compile(params, resized({name: batch[name] for name in "xy"}, 512))
    return jax.jit(function, donate_argnums=donated).lower(*arguments).compile().memory_analysis()


def test_parts_and_recomputation_take_less_memory_and_donation_shares_it():
    plain = compiled_bytes(Settings())
    assert compiled_bytes(Settings(micro_batches=8)).temp_size_in_bytes < plain.temp_size_in_bytes / 3
    every = Settings(checkpoint=("layer.0", "layer.1", "layer.2"))
    assert compiled_bytes(every).temp_size_in_bytes < plain.temp_size_in_bytes
    assert plain.alias_size_in_bytes == 0 < compiled_bytes(Settings(donate=True)).alias_size_in_bytes


def test_donated_parameters_are_used_up_and_others_stay():
    params, batch = make()
    for donate in (True, False):
        given = jax.tree.map(jax.device_put, params)
        step = TrainStep(mean, optax.sgd(0.1), Settings(donate=donate))
        step(given, step.init(given), batch)
        assert all(leaf.is_deleted() is donate for leaf in jax.tree.leaves(given))


def test_sixteen_bits_add_up_in_thirty_two():
    params, batch = make()
    half = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)
    narrow = {name: jnp.asarray(batch[name], jnp.bfloat16) for name in "xy"}
    step = TrainStep(mean, optax.sgd(0.1), Settings(micro_batches=13))
    after, _, _ = step(half, step.init(half), narrow)
    assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {jnp.dtype(jnp.bfloat16)}


def test_bfloat16_keeps_wide_parameters():
    with jax.enable_x64(False):
        params, batch = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), make())
        found = {}
        for precision in (None, "amp-bf16"):
            step = TrainStep(mean, optax.sgd(0.1), Settings(precision=precision))
            after, _, value = step(params, step.init(params), batch)
            assert {leaf.dtype for leaf in jax.tree.leaves((after, value))} == {jnp.dtype(jnp.float32)}
            found[precision] = float(value)
        assert found[None] != found["amp-bf16"] == pytest.approx(found[None], rel=0.05)


def test_keys_differ_from_part_to_part():
    def noisy(params, batch):
        return jnp.mean(params["w"] * jax.random.normal(batch["key"], batch["x"].shape))

    batch = {"x": np.zeros((4, 3)), "key": jax.random.key(0)}
    params = {"w": jnp.ones(())}
    values = []
    for settings in (Settings(), Settings(micro_batches=2), Settings(micro_batches=4)):
        step = TrainStep(noisy, optax.sgd(0.1), settings)
        values.append(float(step(params, step.init(params), batch)[2]))
    assert len(set(values)) == 3


def test_modules_of_equinox_and_flax_train():
    equinox = pytest.importorskip("equinox")
    nnx = pytest.importorskip("flax.nnx")
    with jax.enable_x64(False):
        x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
        module = equinox.nn.MLP(3, 1, 4, 2, key=jax.random.key(0))
        step = TrainStep(lambda own, batch: jnp.mean(jax.vmap(own)(batch) ** 2), optax.sgd(0.1))
        values, state = [], step.init(module)
        for _ in range(2):
            module, state, value = step(module, state, x)
            values.append(float(value))
        assert values[1] != values[0]
        assert module(x[0]).shape == (1,)

        graph, params, rest = nnx.split(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), nnx.Param, ...)
        step = TrainStep(
            lambda own, batch: jnp.mean(nnx.merge(graph, own, rest)(batch) ** 2),
            optax.sgd(0.1),
            settings=Settings(micro_batches=2),
        )
        state, values = step.init(params), []
        for _ in range(2):
            params, state, value = step(params, state, x)
            values.append(float(value))
        assert values[1] < values[0]


def test_a_look_tells_blocks_and_work():
    params, batch = make()
    flops, blocks = look(mean, params, batch)
    assert [call.name for call in blocks] == ["layer.0", "layer.1", "layer.2"]
    assert flops == sum(call.flops for call in blocks) == 3 * 2 * 2 * NUM * WIDTH * 9
    assert look(weighed, params, batch)[0] > 0


def test_the_size_of_a_batch():
    assert check_batch({"x": np.zeros((4, 2)), "y": np.zeros(4), "scale": 2.0, "key": jax.random.key(0)}) == 4
    assert check_batch({"scale": np.float32(1)}) is None


@pytest.mark.parametrize(
    ("error", "text", "loss", "given", "settings"),
    [
        (BadBatch, r"\['x'\] \[4, 2\] and \['y'\] \[3\] disagree", mean, {"x": np.zeros((4, 2)), "y": np.zeros(3)}, {}),
        (BadBatch, "first dimension is 0", mean, {"x": np.zeros((0, 2))}, {}),
        (BadLoss, r"two scalars, but .* shapes \[\[13\]\]", lambda p, b: b["x"][:, 0] * p[0]["inner"][0, 0], None, {}),
        (BadLoss, "tuple with shapes", lambda p, b: (mean(p, b), 1.0, 2.0), None, {}),
        (BadInput, "amp-bf16, but 'amp-fp16' was asked for", mean, None, {"precision": "amp-fp16"}),
        (BadInput, "for another framework", mean, None, {"lora_rank": 4}),
        (BadInput, r"return \(loss, weight\)", mean, None, {"weighting": Weighting("count")}),
        (BadInput, "loss must be a function", 3, None, {}),
    ],
)
def test_bad_input_is_told(error, text, loss, given, settings):
    params, batch = make()
    with pytest.raises(error, match=text):
        step = TrainStep(loss, optax.sgd(0.1), Settings(**settings))
        step(params, step.init(params), batch if given is None else given)


def test_an_optimizer_that_is_none_is_told():
    with pytest.raises(BadOptimizer, match="one of optax"):
        TrainStep(mean, "adam")


def test_parameters_without_numbers_are_told():
    with pytest.raises(BadInput, match="nothing to train"):
        TrainStep(mean, optax.sgd(0.1)).init({"count": jnp.arange(3)})

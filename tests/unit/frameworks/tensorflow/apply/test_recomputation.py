import numpy as np
import pytest
import tensorflow as tf

from memfit.frameworks.tensorflow.apply.recomputation import recomputed


def block(weights, inputs):
    x, seed = inputs
    mask = tf.random.stateless_uniform(tf.shape(x), seed) > 0.5
    h = tf.tanh(x @ weights[0] + weights[1])
    return [x + tf.where(mask, tf.tanh(h @ weights[0]), 0.0), seed + 1]


@pytest.mark.parametrize("mode", ["eager", "graph", "compiled"])
def test_gradients_are_the_same(mode):
    random = np.random.default_rng(0)
    kernel = tf.Variable(random.normal(size=(4, 4)).astype("float32"))
    bias = tf.Variable(random.normal(size=(4,)).astype("float32"), trainable=False)
    x = tf.constant(random.normal(size=(3, 4)).astype("float32"))
    seed = tf.constant([1, 2])
    traced = []

    def step(x, call):
        with tf.GradientTape() as tape:
            tape.watch(x)
            made, following = call([tf.convert_to_tensor(kernel), tf.convert_to_tensor(bias)], [x, seed])
            made, following = call([tf.convert_to_tensor(kernel), tf.convert_to_tensor(bias)], [made, following])
            total = tf.reduce_sum(made**2)
        return (total, following, *tape.gradient(total, [kernel, x]))

    def noted(weights, inputs):
        traced.append(1)
        return block(weights, inputs)

    def recomputing(weights, inputs):
        return recomputed(noted, weights, [True, False], inputs, compiled=mode == "compiled")

    run = step if mode == "eager" else tf.function(step, jit_compile=mode == "compiled")
    plain, again = run(x, block), run(x, recomputing)
    for one, other in zip(plain, again, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    # Two calls, each of them computed again.
    assert len(traced) == 4


def test_variables_that_are_used_without_being_given_are_heard():
    scale = tf.Variable(3.0)

    @tf.function(jit_compile=False)
    def step(x):
        with tf.GradientTape() as tape:
            (made,) = recomputed(lambda _, inputs: [inputs[0] * scale], [], [], [x], compiled=False)
            total = tf.reduce_sum(made)
        return tape.gradient(total, scale)

    assert float(step(tf.constant([1.0, 2.0]))) == 3.0


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_gradients_of_tables_stay_lists_of_rows(mode):
    table, rows = tf.Variable(tf.ones((5, 2))), tf.constant([3, 1, 3])
    kinds = []

    def step():
        with tf.GradientTape() as tape:
            (made,) = recomputed(
                lambda weights, inputs: [tf.gather(weights[0], inputs[0])],
                [tf.convert_to_tensor(table)],
                [True],
                [rows],
                compiled=False,
            )
            total = tf.reduce_sum(made**2)
        gradient = tape.gradient(total, table)
        kinds.append(type(gradient))
        return tf.convert_to_tensor(gradient)

    gradient = (step if mode == "eager" else tf.function(step))()
    assert kinds == [tf.IndexedSlices]
    assert gradient.numpy()[:, 0].tolist() == [0, 2, 0, 4, 0]

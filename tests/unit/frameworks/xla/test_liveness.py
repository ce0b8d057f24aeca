"""Lives of values, by XLA's rules."""

import pytest

from memfit.frameworks.xla.hlo import parse
from memfit.frameworks.xla.liveness import lay_out, lives_of
from tests.unit.frameworks.xla.programs import LOOP, STEP, entry


def buffers(text):
    """Names of the values of each buffer that is no constant."""
    lives = lives_of(parse(text))
    return lives, [
        {value.instruction.name for value in buffer.values} for buffer in lives.buffers if not buffer.is_constant
    ]


def test_a_donated_argument_and_its_result_are_one_buffer():
    lives, names = buffers(STEP)

    assert {"w", "fusion"} in names
    assert lives.buffers[lives.results[0]].argument == 0
    assert lives.buffers[lives.results[1]].argument is None


def test_an_elementwise_instruction_may_write_over_its_operand():
    lives, _ = buffers(STEP)
    by_name = {buffer.values[0].instruction.name: buffer for buffer in lives.buffers}

    assert lives.buffers.index(by_name["hidden"]) in by_name["active"].overwrites
    # A product reads all of its operand for each element.
    assert not by_name["gradient"].overwrites


def test_an_argument_lives_throughout_unless_it_is_donated():
    lives, _ = buffers(STEP)
    by_name = {buffer.values[0].instruction.name: buffer for buffer in lives.buffers}

    assert by_name["x"].values[0].end == lives.num_times
    assert by_name["w"].values[0].end < lives.num_times


def test_what_a_loop_carries_stays_in_one_place():
    _, names = buffers(LOOP)

    carried = next(found for found in names if "carried" in found)
    assert {"carried", "while", "halved"} <= carried
    assert {"sorted"} in names


def test_updates_of_a_slice_are_written_in_place():
    _, names = buffers(
        entry(
            "%a = f32[8]{0} parameter(0)",
            "%i = s32[] parameter(1)",
            "%u = f32[1]{0} parameter(2)",
            "%c = f32[8]{0} copy(%a)",
            "ROOT %d = f32[8]{0} dynamic-update-slice(%c, %u, %i)",
        )
    )

    assert {"c", "d"} in names


def test_tuples_bitcasts_and_barriers_pass_values_on():
    _, names = buffers(
        entry(
            "%a = f32[8]{0} parameter(0)",
            "%b = f32[8]{0} negate(%a)",
            "%t = (f32[8]{0}, f32[8]{0}) tuple(%a, %b)",
            "%o = (f32[8]{0}, f32[8]{0}) opt-barrier(%t)",
            "%g = f32[8]{0} get-tuple-element(%o), index=1",
            "%v = f32[2,4]{1,0} bitcast(%g)",
            "ROOT %s = f32[2,4]{1,0} transpose(%v), dimensions={1,0}",
        )
    )

    assert names == [{"a"}, {"b"}, {"s"}]


def test_operand_aliases_of_custom_calls_are_kept():
    _, names = buffers(
        entry(
            "%a = f32[8]{0} parameter(0)",
            "%c = f32[8]{0} copy(%a)",
            'ROOT %d = f32[8]{0} custom-call(%c), custom_call_target="f", output_to_operand_aliasing={{}: (0, {})}',
        )
    )

    assert {"c", "d"} in names


BRANCHES = """HloModule made, is_scheduled=true

%yes (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %sine = f32[8]{0} sine(%a)
}

%no (b: f32[8]) -> f32[8] {
  %b = f32[8]{0} parameter(0)
  ROOT %cosine = f32[8]{0} cosine(%b)
}

ENTRY %main (p: pred[], x: f32[8]) -> f32[8] {
  %p = pred[] parameter(0)
  %x = f32[8]{0} parameter(1)
  %c = f32[8]{0} conditional(%p, %x, %x), true_computation=%yes, false_computation=%no
  ROOT %r = f32[8]{0} reverse(%c), dimensions={0}
}
"""


def test_branches_give_their_result_in_one_place():
    _, names = buffers(BRANCHES)

    assert {"sine", "cosine", "c"} in names


jax = pytest.importorskip("jax")
jnp = jax.numpy
Shape = jax.ShapeDtypeStruct
WEIGHTS = [Shape((128, 128), "float32")] * 3
IMAGES = Shape((16, 16, 16, 3), "float32")
MATRIX = Shape((256, 128), "float32")


def dense(weights, x, y):
    for weight in weights:
        x = jax.nn.relu(x @ weight)
    return jnp.mean((x - y) ** 2)


def scanned(weights, x, y):
    x, _ = jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight) + x, None), x, weights)
    return jnp.mean((x - y) ** 2)


def recomputed(weights, x, y):
    x, _ = jax.lax.scan(jax.checkpoint(lambda x, weight: (jnp.tanh(x @ weight) + x, None)), x, weights)
    return jnp.mean((x - y) ** 2)


def convolved(weight, x):
    x = jax.lax.conv_general_dilated(x, weight, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.mean(jax.nn.relu(x) ** 2)


def sgd(loss):
    return lambda weights, *batch: jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, *batch))


def momentum(weights, velocity, x, y):
    value, gradients = jax.value_and_grad(dense)(weights, x, y)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradients)
    return jax.tree.map(lambda w, v: w - 0.1 * v, weights, velocity), velocity, value


def looped(x):
    return jax.lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, jnp.tanh(s[1] @ s[1].T @ s[1])), (0, x))[1]


STACK = Shape((6, 128, 128), "float32")
PROGRAMS = {
    "sgd, donated": (sgd(dense), (0,), (WEIGHTS, MATRIX, MATRIX)),
    "sgd, kept": (sgd(dense), (), (WEIGHTS, MATRIX, MATRIX)),
    "momentum": (momentum, (0, 1), (WEIGHTS, WEIGHTS, MATRIX, MATRIX)),
    "scan": (sgd(scanned), (0,), (STACK, MATRIX, MATRIX)),
    "scan, recomputed": (sgd(recomputed), (0,), (STACK, MATRIX, MATRIX)),
    "convolution": (sgd(convolved), (0,), (Shape((3, 3, 3, 8), "float32"), IMAGES)),
    "while": (looped, (), (MATRIX,)),
    "sort and sums": (lambda x: jax.vmap(jnp.sort)(x) + jnp.cumsum(x, 0), (), (MATRIX,)),
    "scatter": (lambda t, i, u: t.at[i].add(u) * 2, (0,), (MATRIX, Shape((9,), "int32"), Shape((9, 128), "float32"))),
    "condition": (lambda x: jax.lax.cond(x.sum() > 0, lambda x: jnp.sin(x) @ x.T, lambda x: x @ x.T, x), (), (MATRIX,)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_layout_is_xlas_own(name):
    function, donated, arguments = PROGRAMS[name]
    compiled = jax.jit(function, donate_argnums=donated).lower(*arguments).compile()
    truth = compiled.memory_analysis()

    layout = lay_out(lives_of(parse(compiled.as_text())))

    assert layout.argument_bytes == truth.argument_size_in_bytes
    assert layout.output_bytes == truth.output_size_in_bytes - truth.alias_size_in_bytes
    assert layout.temporary_bytes == pytest.approx(truth.temp_size_in_bytes, rel=0.03, abs=1024)


def test_results_that_take_an_arguments_place_cost_nothing():
    layout = lay_out(lives_of(parse(STEP)))

    assert layout.argument_bytes == 16 * 16 * 4 + 64 * 16 * 4
    # The sum, and the table of two pointers.
    assert layout.output_bytes == 4 + 16
    # The activation, over which the slope is written, and the gradient.
    assert layout.temporary_bytes == 64 * 16 * 4 + 16 * 16 * 4
    assert layout.constant_bytes == 4


def test_a_loops_own_temporaries_are_counted_once():
    layout = lay_out(lives_of(parse(LOOP)))

    # The array that is twice as long; the counter, in which the loop counts on; and what is compared fits beside.
    assert layout.temporary_bytes == 512 * 4 + 4

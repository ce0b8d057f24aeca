"""Jobs of JAX."""

import functools

import numpy as np
import pytest

from memfit.catalogue import find_device
from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import BadBatch, BadInput, StepFailed
from memfit.core.job import Job
from memfit.core.settings import Settings
from memfit.core.timeline import Category
from memfit.core.trace import Serving
from memfit.frameworks.jax.trace import job as jobs
from memfit.frameworks.jax.trace.job import OpenTraining, is_step, open_job

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy
Shape = jax.ShapeDtypeStruct
HOST = Device("cpu", "CPU", Kind.HOST, None, None, Origin.MEASURED)
GPU = Device("gpu", "GPU", Kind.CUDA, None, 2**30, Origin.MEASURED)
WEIGHTS = {"first": Shape((16, 32), "float32"), "second": Shape((32, 1), "float32")}
BATCH = (np.zeros((8, 16), np.float32), np.zeros((8, 1), np.float32))


def step(weights, batch):
    def loss(weights):
        x, y = batch
        return jnp.mean((jnp.tanh(x @ weights["first"]) @ weights["second"] - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


@pytest.fixture(scope="module")
def opened():
    return open_job(Job(jax.jit(step, donate_argnums=0), None, (WEIGHTS, BATCH)), HOST)


def test_a_step_is_told_from_other_functions():
    assert is_step(jax.jit(step), ())
    assert is_step(step, (BATCH,))
    assert not is_step(step, ("text", 3))


def test_the_trace_counts_parameters_gradients_and_the_batch(opened):
    trace = opened.trace(None)

    assert opened.name == "step"
    assert opened.batch_size == 8
    assert trace.num_parameters == 16 * 32 + 32
    assert trace.parameter_bytes == 4 * trace.num_parameters
    assert trace.batch_bytes == 8 * 17 * 4
    assert trace.state_bytes == {
        Category.PARAMETER: trace.parameter_bytes,
        Category.GRADIENT: trace.parameter_bytes,
    }
    assert trace.assigned_bytes >= trace.timeline.peak()[1]
    assert "parameter: weights; input batch: batch" in opened.notes[0].text


def test_other_batch_sizes_are_compiled_once(opened):
    small, large = opened.trace(8), opened.trace(64)

    assert large.batch_bytes == 8 * small.batch_bytes
    assert large.assigned_bytes > small.assigned_bytes
    assert opened.trace(64) is large


def test_a_batch_size_can_be_given_when_opening():
    opened = open_job(Job(step, None, (WEIGHTS, BATCH)), HOST, 32)

    assert opened.batch_size == 32
    assert opened.trace(None).batch_bytes == 32 * 17 * 4


def test_a_gpu_is_simulated_and_says_so():
    opened = open_job(Job(step, None, (WEIGHTS, BATCH)), GPU)

    codes = {note.code for note in opened.notes}
    assert {"xla-cpu-layout", "xla-library-workspaces", "xla-preallocation"} <= codes
    assert "xla-cpu-bfloat16" not in codes
    half = {name: Shape(value.shape, "bfloat16") for name, value in WEIGHTS.items()}
    assert "xla-cpu-bfloat16" in {note.code for note in open_job(Job(step, None, (half, BATCH)), GPU).notes}


def test_a_step_runs_as_it_is(opened):
    assert opened.trace(8, Settings()) is opened.trace(8)
    with pytest.raises(BadInput, match="runs as it is written"):
        opened.trace(8, Settings(micro_batches=2))


@pytest.mark.parametrize(
    ("job", "error", "message"),
    [
        (Job(3, None, (WEIGHTS,)), BadInput, "must be a function, but int was given"),
        (Job(step, None, (WEIGHTS,)), BadInput, "can't be called with the 1 arguments given"),
        (Job(step, None, ("a", "b")), BadInput, "no arrays among the 2 arguments of step"),
        (Job(step, None, (WEIGHTS, BATCH), optimizer="adam"), BadInput, "brings its own optimizer"),
        (Job(step, None, (WEIGHTS, BATCH), precision="bf16"), BadInput, "brings its own precision"),
    ],
)
def test_bad_jobs_are_refused(job, error, message):
    with pytest.raises(error, match=message):
        open_job(job, HOST)


def test_bad_batch_sizes_are_refused():
    uneven = (np.zeros((8, 16), np.float32), np.zeros((1, 1), np.float32))

    with pytest.raises(BadBatch, match="at least 1, but 0"):
        open_job(Job(step, None, (WEIGHTS, BATCH)), HOST, 0)
    with pytest.raises(BadBatch, match="share no first dimension"):
        open_job(Job(step, None, (WEIGHTS, uneven)), HOST, 4)


CPU = find_device("cpu")
PARAMS = {"w": jax.ShapeDtypeStruct((8, 16), "float32"), "v": jax.ShapeDtypeStruct((16, 1), "float32")}
TRAINED_BATCH = (jax.ShapeDtypeStruct((32, 8), "float32"), jax.ShapeDtypeStruct((32,), "float32"))


def loss(params, batch):
    x, y = batch
    return jax.numpy.mean((jax.numpy.tanh(x @ params["w"]) @ params["v"][:, 0] - y) ** 2)


def opened_training(batch_size=None, **changes):
    return open_job(
        Job(**{"model": loss, "batch": (PARAMS, TRAINED_BATCH), "optimizer": optax.adam(1e-3), **changes}),
        CPU,
        batch_size,
    )


def test_a_loss_with_an_optimizer_is_opened_as_a_step():
    job = opened_training()
    assert isinstance(job, OpenTraining)
    assert (job.name, job.batch_size, opened_training(8).batch_size) == ("loss", 32, 8)


def test_the_trace_has_what_the_step_holds():
    trace = opened_training().trace(None)
    weights = 4 * (8 * 16 + 16)
    assert trace.state_bytes == {
        Category.PARAMETER: weights,
        Category.GRADIENT: weights,
        Category.OPTIMIZER_STATE: 2 * weights + 4,
    }
    assert trace.num_parameters == weights // 4 and trace.batch_bytes == 4 * 32 * 9
    assert trace.serving is Serving.BEST_FIT
    # Without donation, old and new are there at once.
    assert trace.assigned_bytes > 2 * 3 * weights
    donated = opened_training().trace(None, Settings(donate=True))
    # With it, results are in the arguments' places; scratch memory counts where results aren't there yet.
    assert donated.assigned_bytes < trace.assigned_bytes - weights
    modules = {block.module for block in trace.timeline.blocks if block.category is Category.PARAMETER}
    assert {"w", "v"} <= modules


def test_more_samples_take_more():
    job = opened_training()
    assert job.trace(64).assigned_bytes > job.trace(None).assigned_bytes


def test_the_forward_pass_is_timed_on_shapes():
    sample, call = opened_training().time_forward()
    assert sample > 0 and call >= 0


@pytest.mark.parametrize(
    ("error", "text", "changes", "size"),
    [
        (BadInput, "followed by its parameters and one batch, but 3 things", {"batch": (PARAMS, 1, 2)}, None),
        (BadBatch, "can't have 4 of them", {"batch": (PARAMS, jax.ShapeDtypeStruct((), "float32"))}, 4),
        (StepFailed, "TypeError: dot_general", {"batch": (PARAMS, (TRAINED_BATCH[1], TRAINED_BATCH[1]))}, None),
    ],
)
def test_bad_input_is_told(error, text, changes, size):
    with pytest.raises(error, match=text):
        opened_training(size, **changes).look()


jax = pytest.importorskip("jax")
jnp = jax.numpy
VECTOR = jax.ShapeDtypeStruct((4,), "float32")


def test_plain_functions_hold_what_is_no_array():
    def step(x, training, name):
        assert name == "a"
        return x if training else 2 * x

    lowered = jobs.lower(step, (VECTOR, True, "a"))

    assert lowered.out_info.shape == (4,)


def test_steps_of_equinox_take_shapes():
    equinox = pytest.importorskip("equinox")

    @equinox.filter_jit(donate="all")
    def step(model, x):
        return equinox.tree_at(lambda m: m.weight, model, model.weight * x[0])

    model = equinox.nn.Linear(3, 4, key=jax.random.key(0))

    lowered = jobs.lower(step, (model, VECTOR))

    assert all(info.donated for info in jax.tree.leaves(lowered.args_info))


def test_values_that_are_needed_are_explained():
    def step(x):
        if x.sum() > 0:
            return x
        return -x

    with pytest.raises(StepFailed) as caught:
        jobs.lower(step, (VECTOR,))

    text = str(caught.value)
    assert "TracerBoolConversionError" in text
    assert "test_job.py" in text
    assert "if x.sum() > 0:" in text
    assert "use jnp.where or jax.lax.cond" in text


@pytest.mark.parametrize("jit", [lambda step: step, jax.jit])
def test_arrays_that_are_kept_are_explained(jit):
    kept = []

    def step(x):
        total = x.sum()
        kept.append(total)
        return total

    with pytest.raises(StepFailed, match="must not keep arrays anywhere but in its results"):
        jobs.check_leaks(jit(step), (VECTOR,))
    jobs.check_leaks(jit(jnp.sum), (VECTOR,))


def test_leaked_arrays_that_are_used_are_explained():
    kept = []
    jax.eval_shape(kept.append, VECTOR)

    with pytest.raises(StepFailed, match="must not keep arrays anywhere but in its results"), jobs.explained():
        jnp.sin(kept[0])


def test_other_failures_show_the_line():
    def step(x):
        return x @ jnp.ones((3, 3))

    with pytest.raises(StepFailed, match=r"test_job\.py:\d+ in step: TypeError"):
        jobs.lower(step, (VECTOR,))


def test_arguments_that_a_step_does_not_take_are_refused():
    def step(x, y):
        return x + y

    with pytest.raises(BadInput, match=r"step\(x, y\) can't be called with the 1 arguments given: missing a required"):
        jobs.check_call(step, (VECTOR,))
    jobs.check_call(step, (VECTOR, VECTOR))


def test_steps_and_arguments_have_names():
    def step(x, *rest):
        return x

    assert jobs.name_of(jax.jit(step)) == "step"
    assert jobs.name_of(functools.partial(step, 1)) == "step"
    assert jobs.argument_names(step, 3) == ["x", "argument 2", "argument 3"]


def test_numbers_are_arrays_to_a_jitted_step():
    step = jax.jit(lambda x, rate: x * rate.astype(x.dtype))
    arguments = (jax.ShapeDtypeStruct((3,), "float32"), 0.1)
    jobs.check_leaks(step, arguments)
    assert jobs.lower(step, arguments).out_info.shape == (3,)

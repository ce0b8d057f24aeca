import jax
import optax
import pytest

from memfit.catalogue import find_device
from memfit.core.errors import BadBatch, BadInput, StepFailed
from memfit.core.job import Job
from memfit.core.settings import Settings
from memfit.core.timeline import Category
from memfit.core.trace import Serving
from memfit.frameworks.jax.trace.job import open_job
from memfit.frameworks.jax.trace.training_job import OpenTraining

CPU = find_device("cpu")
PARAMS = {"w": jax.ShapeDtypeStruct((8, 16), "float32"), "v": jax.ShapeDtypeStruct((16, 1), "float32")}
BATCH = (jax.ShapeDtypeStruct((32, 8), "float32"), jax.ShapeDtypeStruct((32,), "float32"))


def loss(params, batch):
    x, y = batch
    return jax.numpy.mean((jax.numpy.tanh(x @ params["w"]) @ params["v"][:, 0] - y) ** 2)


def opened(batch_size=None, **changes):
    return open_job(
        Job(**{"model": loss, "batch": (PARAMS, BATCH), "optimizer": optax.adam(1e-3), **changes}), CPU, batch_size
    )


def test_a_loss_with_an_optimizer_is_opened_as_a_step():
    job = opened()
    assert isinstance(job, OpenTraining)
    assert (job.name, job.batch_size, opened(8).batch_size) == ("loss", 32, 8)


def test_the_trace_has_what_the_step_holds():
    trace = opened().trace(None)
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
    donated = opened().trace(None, Settings(donate=True))
    # With it, results are in the arguments' places; scratch memory counts where results aren't there yet.
    assert donated.assigned_bytes < trace.assigned_bytes - weights
    modules = {block.module for block in trace.timeline.blocks if block.category is Category.PARAMETER}
    assert {"w", "v"} <= modules


def test_more_samples_take_more():
    job = opened()
    assert job.trace(64).assigned_bytes > job.trace(None).assigned_bytes


def test_the_forward_pass_is_timed_on_shapes():
    sample, call = opened().time_forward()
    assert sample > 0 and call >= 0


@pytest.mark.parametrize(
    ("error", "text", "changes", "size"),
    [
        (BadInput, "followed by its parameters and one batch, but 3 things", {"batch": (PARAMS, 1, 2)}, None),
        (BadBatch, "can't have 4 of them", {"batch": (PARAMS, jax.ShapeDtypeStruct((), "float32"))}, 4),
        (StepFailed, "TypeError: dot_general", {"batch": (PARAMS, (BATCH[1], BATCH[1]))}, None),
    ],
)
def test_bad_input_is_told(error, text, changes, size):
    with pytest.raises(error, match=text):
        opened(size, **changes).look()

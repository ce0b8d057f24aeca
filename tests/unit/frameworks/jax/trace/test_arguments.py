"""What arguments of a step are taken for."""

import numpy as np
import pytest

from memfit.core.errors import BadBatch
from memfit.core.timeline import Category
from memfit.frameworks.jax.trace import arguments as roles

jax = pytest.importorskip("jax")
Shape = jax.ShapeDtypeStruct
PARAMETERS = {"dense": {"w": Shape((8, 4), "float32"), "b": Shape((4,), "float32")}}
IMAGES, LABELS = Shape((32, 8), "float32"), Shape((32,), "int32")
LOSS = Shape((), "float32")


def categories(arguments, results):
    return [leaf.category for leaf in roles.assign(arguments, results)]


def test_what_is_given_back_is_state_and_the_rest_the_batch():
    found = categories((PARAMETERS, IMAGES, LABELS), (PARAMETERS, LOSS))

    assert found == [Category.PARAMETER, Category.PARAMETER, Category.BATCH, Category.BATCH]


def test_a_second_tree_of_the_same_shapes_is_optimizer_state():
    velocity = jax.tree.map(lambda leaf: leaf, PARAMETERS)

    found = categories((PARAMETERS, velocity, IMAGES), (PARAMETERS, velocity, LOSS))

    assert found == [*[Category.PARAMETER] * 2, *[Category.OPTIMIZER_STATE] * 2, Category.BATCH]


def test_states_of_optax_are_known_by_their_type():
    optax = pytest.importorskip("optax")
    state = jax.eval_shape(optax.adam(1e-3).init, PARAMETERS)

    leaves = roles.assign((state, PARAMETERS, IMAGES), (state, PARAMETERS))

    assert {leaf.category for leaf in leaves if leaf.argument == 0} == {Category.OPTIMIZER_STATE}
    assert {leaf.category for leaf in leaves if leaf.argument == 1} == {Category.PARAMETER}
    assert "dense" in {leaf.module for leaf in leaves if leaf.argument == 0}


def test_one_state_with_everything_is_taken_apart():
    state = {"params": PARAMETERS, "opt_state": {"mu": PARAMETERS}, "step": Shape((), "int32")}

    leaves = roles.assign((state, IMAGES), (state, LOSS))

    by_path = {".".join(leaf.path): leaf.category for leaf in leaves}
    assert by_path["params.dense.w"] is Category.PARAMETER
    assert by_path["opt_state.mu.dense.w"] is Category.OPTIMIZER_STATE
    assert by_path["step"] is Category.BUFFER
    assert {leaf.module for leaf in leaves if "params" in leaf.path} == {"dense"}


def test_without_anything_given_back_the_first_argument_is_the_model():
    found = categories((Shape((8, 4), "float32"), Shape((8, 8), "float32")), LOSS)

    assert found == [Category.PARAMETER, Category.BATCH]


def test_keys_of_generators_are_no_batch():
    key = jax.eval_shape(lambda: jax.random.key(0))
    old = Shape((2,), "uint32")

    found = categories((PARAMETERS, key, old, IMAGES), (PARAMETERS, LOSS))

    assert found[2:] == [Category.BUFFER, Category.BUFFER, Category.BATCH]
    assert roles.size_of(key) == 8


def test_the_batch_is_resized_and_keeps_its_role():
    arguments = (PARAMETERS, {"x": IMAGES, "y": np.zeros(32, np.int32), "scale": np.float32(1)})
    leaves = roles.assign(arguments, (PARAMETERS, LOSS))

    resized = roles.resized(arguments, leaves, roles.batch_size_of(leaves), 100)

    assert resized[1]["x"].shape == (100, 8)
    assert resized[1]["y"].shape == (100,)
    assert resized[0] is not PARAMETERS or resized[0] == PARAMETERS
    assert [leaf.category for leaf in roles.same_roles(resized, leaves)] == [leaf.category for leaf in leaves]


def test_arrays_without_a_common_first_dimension_have_no_batch_size():
    leaves = roles.assign((PARAMETERS, (IMAGES, Shape((3, 5), "float32"))), (PARAMETERS, LOSS))

    assert roles.batch_size_of(leaves) is None


def test_leaves_are_matched_by_shape_in_order():
    leaves = roles.assign((PARAMETERS, IMAGES), (PARAMETERS, LOSS))

    found = roles.matched([Shape((8, 4), "float32"), LOSS, Shape((8, 4), "float32")], leaves)

    assert found[0] is not None and found[0].path == ("dense", "w")
    assert found[1:] == [None, None]


def test_an_empty_batch_is_refused():
    leaves = roles.assign((PARAMETERS, Shape((0, 8), "float32")), (PARAMETERS, LOSS))

    with pytest.raises(BadBatch, match=r"shape \(0, 8\), which is empty"):
        roles.check_batch(leaves)


def test_the_note_names_each_argument():
    leaves = roles.assign((PARAMETERS, IMAGES), (PARAMETERS, LOSS))

    assert roles.classified(leaves, ["weights", "x"]).text.endswith("parameter: weights; input batch: x")


def test_arrays_of_numpy_count_as_what_jax_makes_of_them():
    given = {"w": np.zeros((8, 4))}

    assert [(str(leaf.dtype), leaf.size_bytes) for leaf in roles.leaves_of([given])] == [("float32", 128)]

"""Steps on TensorFlow: what a failed graph or a compiled step has changed is undone. See conftest for the process."""


def test_a_compiled_step_is_undone_by_the_values_that_were_held(on_tensorflow):
    assert on_tensorflow["compiled True"] == [True, True]


def test_a_graph_that_has_begun_to_update_is_not_taken_for_undone(on_tensorflow):
    changed, undone = on_tensorflow["compiled False"]

    assert changed
    assert "between two steps" in undone
    assert "memfit run" in undone


def test_nothing_is_updated_before_all_gradients_are_there(on_tensorflow):
    # The count of steps doesn't depend on gradients, and would be ahead without the barrier.
    assert on_tensorflow["graph"] is True
    assert on_tensorflow["iterations"] == 1


def test_a_model_without_call_is_fitted_as_keras_fits_it(on_tensorflow):
    plain, guarded = on_tensorflow["without call"]

    assert guarded == plain

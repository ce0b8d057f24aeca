"""Arrays in a given order on TensorFlow. See conftest for the process."""


def test_each_pass_has_the_order_that_it_was_given(on_tensorflow):
    assert on_tensorflow["order"] == [[[6, 5, 4], [3, 2, 1], [0]], [[0, 2, 4], [6, 1, 3], [5]]]


def test_the_last_batch_may_be_smaller(on_tensorflow):
    assert on_tensorflow["shapes"] == ["(None,)", "(None, 2)"]

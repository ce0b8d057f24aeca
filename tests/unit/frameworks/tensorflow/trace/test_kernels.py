"""What kernels do with memory."""

import pytest

from memfit.frameworks.tensorflow.trace.kernels import forwarded, output_shape, scratch_bytes, seconds_of
from tests.unit.frameworks.tensorflow.graphs import node


@pytest.mark.parametrize(("op", "places"), [("AddV2", (0, 1)), ("Relu", (0,)), ("SelectV2", (1, 2)), ("Conv2D", ())])
def test_kernels_write_over_what_they_may(op, places):
    assert forwarded(node("n", op), 0) == places


def test_the_gradient_of_the_loss_takes_the_place_of_the_logits():
    loss = node("n", "SparseSoftmaxCrossEntropyWithLogits", num_outputs=2)
    assert (forwarded(loss, 0), forwarded(loss, 1)) == ((), (0,))


def test_the_loss_takes_the_place_of_the_logits_once_more():
    assert scratch_bytes(node("n", "SoftmaxCrossEntropyWithLogits", shape=(8,))) == 32
    assert scratch_bytes(node("n", "Conv2D", shape=(8, 4, 4, 2))) == 0


@pytest.mark.parametrize(
    ("op", "shapes", "shape"),
    [
        ("MatMul", [(4, 8), (8, 3)], (4, 3)),
        ("AddV2", [(4, 1), (3,)], (4, 3)),
        ("BiasAddGrad", [(4, 8)], (8,)),
        ("ConcatV2", [(4, 8), (4, 2), ()], (4, 10)),
        ("Unknown", [(4, 8), (5, 8)], (5, 8)),
        ("Unknown", [], ()),
    ],
)
def test_shapes_that_only_the_run_tells(op, shapes, shape):
    assert output_shape(node("n", op), 0, shapes) == shape


def test_transposed_products():
    made = node("n", "MatMul", transpose_a=True, transpose_b=True)
    assert output_shape(made, 0, [(8, 4), (3, 8)]) == (4, 3)


def test_convolutions_take_longer_than_what_they_touch():
    convolution = node("n", "Conv2D", shape=(8, 16, 16, 64))
    inputs = [(8, 16, 16, 64), (3, 3, 64, 64)]
    plain = seconds_of(node("n", "AddV2", shape=(8, 16, 16, 64)), 1000, inputs)
    assert seconds_of(convolution, 1000, inputs) > 10 * plain


def test_a_kernel_that_is_taken_transposed_takes_longer():
    """The gradient of a layer's input still reads the kernel when that of the kernel itself has long been there."""
    of_kernel = node("n", "MatMul", shape=(4096, 4096), transpose_a=True)
    of_input = node("n", "MatMul", shape=(16, 4096), transpose_b=True)
    touched = 4096 * 4096 * 4

    late = seconds_of(of_input, touched, [(16, 4096), (4096, 4096)])
    early = seconds_of(of_kernel, touched, [(16, 4096), (16, 4096)])
    update = seconds_of(node("n", "Mul", shape=(4096, 4096)), 2 * touched, [(4096, 4096), ()])

    assert late > early + update

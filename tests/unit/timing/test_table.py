import numpy as np
import pytest

from memfit.timing.table import Kind, between, kind_of, table_of
from tests.unit.timing.operators import elementwise, product


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("aten.addmm", Kind.PRODUCT),
        ("aten.convolution_backward", Kind.CONVOLUTION),
        ("aten._scaled_dot_product_efficient_attention", Kind.ATTENTION),
        ("aten._scaled_dot_product_flash_attention_backward", Kind.ATTENTION_BACKWARD),
        ("aten.native_batch_norm_backward", Kind.BATCH_NORM_BACKWARD),
        ("aten.native_layer_norm", Kind.NORM),
        ("aten._foreach_add_", Kind.UPDATE),
        ("aten.hardswish", Kind.ELEMENTWISE),
        ("aten._cudnn_rnn", Kind.RECURRENT),
        ("inductor.fused", Kind.ELEMENTWISE),
    ],
)
def test_kinds_follow_from_names(op, kind):
    assert kind_of(op) is kind


def test_other_batch_sizes_lie_on_a_line():
    small, large = table_of([product(4, 8, 16)]), table_of([product(8, 8, 16)])
    exact = table_of([product(12, 8, 16)])
    made = between((4, small), (8, large), 12)
    assert np.allclose(made.sizes, exact.sizes) and np.allclose(made.flops, exact.flops)
    assert between((4, small), None, 12) is small
    # Another number of operators is another step.
    assert between((4, small), (8, table_of([product(8, 8, 16), elementwise(8)])), 12) is small


def test_no_operators_are_a_table_too():
    assert len(table_of([])) == 0

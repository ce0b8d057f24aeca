"""Sizes of tensors."""

import pytest

from memfit.adapters.tensorflow.nodes import tensor_bytes


@pytest.mark.parametrize(("shape", "item_bytes", "size"), [((), 4, 4), ((2, 3), 4, 24), ((0, 5), 4, 0), ((7,), 0, 0)])
def test_a_tensor_has_its_elements(shape, item_bytes, size):
    assert tensor_bytes(shape, item_bytes) == size

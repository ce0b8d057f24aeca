"""Slices; training on JAX is in integration/test_fit_equality.py, as a process has one backend."""

import pytest

pytest.importorskip("jax")

import numpy as np

from memfit.frameworks.keras.apply.jax_steps import _rows


def test_rows_of_every_array_are_taken():
    data = ({"a": np.arange(8).reshape(4, 2)}, np.arange(4), None)
    found = _rows(data, 1, 2)
    assert found[0]["a"].tolist() == [[2, 3], [4, 5]]
    assert (found[1].tolist(), found[2]) == ([1, 2], None)

import torch

from memfit.adapters.torch.precisions import AUTOCAST, WEIGHTS
from memfit.core.job import AUTOCASTS, PRECISIONS


def test_every_precision_has_a_dtype():
    assert set(AUTOCAST) == set(AUTOCASTS)
    assert {*WEIGHTS, *AUTOCAST} == set(PRECISIONS)


def test_names_say_the_width():
    assert {name[-2:]: dtype.itemsize * 8 for name, dtype in {**WEIGHTS, **AUTOCAST}.items()} == {"16": 16, "32": 32}
    assert AUTOCAST["amp-fp16"] is WEIGHTS["fp16"] is torch.float16

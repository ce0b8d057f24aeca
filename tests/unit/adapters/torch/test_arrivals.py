import pytest

torch = pytest.importorskip("torch")

from memfit.adapters.torch.arrivals import Arrivals  # noqa: E402 (needs torch)


class Loop:
    """Says where the script is."""

    line = "train.py:7"
    steps = 1

    def arrivals(self, **options):
        return Arrivals(lambda: self.line, lambda: self.steps, **options)


def test_what_every_step_copies_is_its_batch():
    loop = Loop()
    arrivals = loop.arrivals()
    for line, tensor in (("train.py:7", torch.zeros(8, 3)), ("train.py:9", torch.zeros(8)), ("a:1", torch.tensor(2.0))):
        loop.line = line
        assert arrivals(tensor) is tensor

    assert arrivals.batch_size == 8
    assert arrivals.lines == ("train.py:7", "train.py:9")


def test_what_comes_before_the_first_update_is_no_batch():
    loop = Loop()
    loop.steps = 0
    arrivals = loop.arrivals()
    arrivals(torch.zeros(5, 2))
    loop.steps = 1
    arrivals(torch.nn.Parameter(torch.zeros(6, 2)))

    assert arrivals.batch_size is None
    assert arrivals.lines == ()


def test_batches_of_several_sizes_have_no_size():
    arrivals = Loop().arrivals()
    arrivals(torch.zeros(8, 3))
    arrivals(torch.zeros(4, 3))

    assert arrivals.batch_size is None
    assert arrivals.lines == ()


def test_only_batches_are_cut_down():
    loop = Loop()
    arrivals = loop.arrivals(parts=3, split_at=("train.py:7",), batch_size=8)

    assert arrivals(torch.zeros(8, 3)).shape == (3, 3)
    assert arrivals(torch.zeros(7, 3)).shape == (7, 3)
    assert arrivals(torch.nn.Parameter(torch.zeros(8, 3))).shape == (8, 3)
    loop.line = "train.py:1"
    assert arrivals(torch.zeros(8, 3)).shape == (8, 3)

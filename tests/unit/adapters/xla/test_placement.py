from memfit.adapters.xla.placement import Slice


def test_slices_come_in_the_order_of_memory():
    assert sorted([Slice(1, 0, 8), Slice(0, 64, 8), Slice(0, 0, 16)]) == [
        Slice(0, 0, 16),
        Slice(0, 64, 8),
        Slice(1, 0, 8),
    ]

from memfit.adapters.xla.placement import Placement, Slice


def test_values_are_found_by_who_makes_them_and_pieces_by_their_place():
    placement = Placement({("sorted", (1,)): Slice(1, 0, 8), ("x", ()): Slice(0, 64, 8)}, {0: 128})

    assert placement.slices["sorted", (1,)].range not in placement.ranges
    # Pieces come in the order of memory.
    assert sorted([*placement.slices.values(), Slice(0, 0, 16)])[:2] == [Slice(0, 0, 16), Slice(0, 64, 8)]

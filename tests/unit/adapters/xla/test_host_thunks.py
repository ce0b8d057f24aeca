from memfit.adapters.xla.hlo import parse
from memfit.adapters.xla.host_thunks import Thunk, thunks_of
from memfit.adapters.xla.liveness import lives_of
from memfit.adapters.xla.placement import Placement, Slice
from tests.unit.adapters.xla.programs import LOOP, entry

CHAIN = entry(
    "%a = f32[8]{0} parameter(0)",
    "%b = f32[8]{0} exponential(%a)",
    "%c = f32[8]{0} reverse(%b), dimensions={0}",
    "%d = f32[8]{0} cosine(%a)",
    "ROOT %e = f32[8]{0} add(%c, %d)",
)


def thunks(text: str, **slices: Slice) -> list[Thunk]:
    """Of a program whose values lie where it is said; all else has a place of its own."""
    module = parse(text)
    placement = Placement({(name, ()): piece for name, piece in slices.items()}, {0: 1024})
    return thunks_of(module, lives_of(module), placement, 2)


def waits(text: str, **slices: Slice) -> list[set[int]]:
    """Whom each thunk waits for."""
    return [thunk.waits_for for thunk in thunks(text, **slices)]


def test_who_reads_waits_for_who_wrote():
    # b, c, d and e: arguments, tuples and constants run nothing
    assert waits(CHAIN) == [set(), {0}, set(), {1, 2}]
    assert [thunk.then for thunk in thunks(CHAIN)] == [[1], [3], [3], []]


def test_who_writes_waits_for_all_who_used_the_place():
    # GIVEN a value, d, that lies where b was
    shared = {"b": Slice(0, 0, 32), "d": Slice(0, 0, 32)}

    # THEN it waits for who wrote b, and for who reads it
    assert waits(CHAIN, **shared)[2] == {0, 1}


def test_pieces_that_only_overlap_make_wait_too():
    assert waits(CHAIN, b=Slice(0, 0, 32), d=Slice(0, 16, 32))[2] == {0, 1}
    assert waits(CHAIN, b=Slice(0, 0, 32), d=Slice(0, 32, 32))[2] == set()
    assert waits(CHAIN, b=Slice(0, 0, 32), d=Slice(1, 0, 32))[2] == set()


def test_a_place_is_that_of_who_wrote_it_last():
    # GIVEN three values in one place, the second of which is read after the third was written beside it
    text = entry(
        "%a = f32[8]{0} parameter(0)",
        "%b = f32[8]{0} exponential(%a)",
        "%c = f32[8]{0} cosine(%a)",
        "%d = f32[8]{0} sine(%c)",
        "ROOT %e = f32[8]{0} add(%c, %d)",
    )

    found = waits(text, b=Slice(0, 0, 64), c=Slice(0, 0, 32), d=Slice(0, 32, 32))

    assert found == [set(), {0}, {0, 1}, {1, 2}]


def test_what_is_written_to_ranges_that_are_taken_is_known():
    found = thunks(CHAIN, b=Slice(0, 0, 32), c=Slice(7, 0, 32))

    assert [thunk.writes for thunk in found] == [(Slice(0, 0, 32),), (), (), ()]


def test_a_loop_is_one_thunk():
    found = thunks(LOOP)

    # THEN all that its condition and body run belongs to it
    assert len(found) == 3
    first, last = found[2].times
    assert last - first > 3
    assert found[2].waits_for == {0, 1}

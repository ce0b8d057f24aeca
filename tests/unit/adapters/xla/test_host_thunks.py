from memfit.adapters.xla.hlo import parse
from memfit.adapters.xla.host_kernels import Way
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


CALLS = """HloModule made, is_scheduled=true

%parallel (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %inside = f32[8]{0} cosine(%p), backend_config={"outer_dimension_partitions":["4"]}
}

%several (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  %once = f32[8]{0} cosine(%q)
  ROOT %twice = f32[8]{0} cosine(%once)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = f32[8]{0} exponential(%a)
  %c = f32[8]{0} call(%b), to_apply=%parallel
  %d = f32[8]{0} call(%c), to_apply=%several
  ROOT %e = f32[8]{0} sine(%d)
}
"""


def test_a_call_waits_as_what_it_runs_does():
    found = thunks(CALLS)

    assert [thunk.waits_for for thunk in found] == [set(), {0}, {1}, {2}]
    # THEN one that runs a single instruction runs as that does, in four parts
    assert (found[1].kernel.way, found[1].kernel.num_tasks) == (Way.SHARED, 4)
    assert found[2].kernel.way is Way.INLINE
    assert [thunk.times for thunk in found] == [(0, 0), (1, 2), (3, 5), (6, 6)]


def test_a_choice_is_one_thunk():
    text = CALLS.replace(
        "%d = f32[8]{0} call(%c), to_apply=%several",
        "%yes = pred[] constant(true)\n"
        "  %d = f32[8]{0} conditional(%yes, %c, %c), true_computation=%several, false_computation=%parallel",
    )

    found = thunks(text)

    assert [thunk.waits_for for thunk in found] == [set(), {0}, {1}, {2}]


def test_programs_that_run_nothing_have_no_thunks():
    assert thunks(entry("ROOT %t = token[] after-all()")) == []
    assert thunks(entry("%a = f32[8]{0} parameter(0)", "ROOT %t = (f32[8]{0}) tuple(%a)")) == []


def test_nobody_waits_for_what_has_no_bytes():
    text = entry(
        "%a = f32[8]{0} parameter(0)",
        "%none = f32[0]{0} slice(%a), slice={[0:0]}",
        "%b = f32[8]{0} exponential(%a)",
        "ROOT %c = f32[8]{0} cosine(%b)",
    )

    assert waits(text, none=Slice(0, 0, 0), b=Slice(0, 0, 32)) == [set(), set(), {1}]


def test_barriers_run_nothing():
    text = entry(
        "%a = f32[8]{0} parameter(0)",
        "%b = f32[8]{0} exponential(%a)",
        "%held = f32[8]{0} opt-barrier(%b)",
        "ROOT %c = f32[8]{0} cosine(%held)",
    )

    assert waits(text) == [set(), {0}]

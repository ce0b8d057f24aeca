"""Lives of values, by XLA's rules."""

from memfit.frameworks.xla.hlo import parse
from memfit.frameworks.xla.liveness import lives_of
from tests.unit.frameworks.xla.programs import LOOP, STEP, entry


def buffers(text):
    """Names of the values of each buffer that is no constant."""
    lives = lives_of(parse(text))
    return lives, [
        {value.instruction.name for value in buffer.values} for buffer in lives.buffers if not buffer.is_constant
    ]


def test_a_donated_argument_and_its_result_are_one_buffer():
    lives, names = buffers(STEP)

    assert {"w", "fusion"} in names
    assert lives.buffers[lives.results[0]].argument == 0
    assert lives.buffers[lives.results[1]].argument is None


def test_an_elementwise_instruction_may_write_over_its_operand():
    lives, _ = buffers(STEP)
    by_name = {buffer.values[0].instruction.name: buffer for buffer in lives.buffers}

    assert lives.buffers.index(by_name["hidden"]) in by_name["active"].overwrites
    # A product reads all of its operand for each element.
    assert not by_name["gradient"].overwrites


def test_an_argument_lives_throughout_unless_it_is_donated():
    lives, _ = buffers(STEP)
    by_name = {buffer.values[0].instruction.name: buffer for buffer in lives.buffers}

    assert by_name["x"].values[0].end == lives.num_times
    assert by_name["w"].values[0].end < lives.num_times


def test_what_a_loop_carries_stays_in_one_place():
    _, names = buffers(LOOP)

    carried = next(found for found in names if "carried" in found)
    assert {"carried", "while", "halved"} <= carried
    assert {"sorted"} in names


def test_updates_of_a_slice_are_written_in_place():
    _, names = buffers(
        entry(
            "%a = f32[8]{0} parameter(0)",
            "%i = s32[] parameter(1)",
            "%u = f32[1]{0} parameter(2)",
            "%c = f32[8]{0} copy(%a)",
            "ROOT %d = f32[8]{0} dynamic-update-slice(%c, %u, %i)",
        )
    )

    assert {"c", "d"} in names


def test_tuples_bitcasts_and_barriers_pass_values_on():
    _, names = buffers(
        entry(
            "%a = f32[8]{0} parameter(0)",
            "%b = f32[8]{0} negate(%a)",
            "%t = (f32[8]{0}, f32[8]{0}) tuple(%a, %b)",
            "%o = (f32[8]{0}, f32[8]{0}) opt-barrier(%t)",
            "%g = f32[8]{0} get-tuple-element(%o), index=1",
            "%v = f32[2,4]{1,0} bitcast(%g)",
            "ROOT %s = f32[2,4]{1,0} transpose(%v), dimensions={1,0}",
        )
    )

    assert names == [{"a"}, {"b"}, {"s"}]


def test_operand_aliases_of_custom_calls_are_kept():
    _, names = buffers(
        entry(
            "%a = f32[8]{0} parameter(0)",
            "%c = f32[8]{0} copy(%a)",
            'ROOT %d = f32[8]{0} custom-call(%c), custom_call_target="f", output_to_operand_aliasing={{}: (0, {})}',
        )
    )

    assert {"c", "d"} in names


BRANCHES = """HloModule made, is_scheduled=true

%yes (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %sine = f32[8]{0} sine(%a)
}

%no (b: f32[8]) -> f32[8] {
  %b = f32[8]{0} parameter(0)
  ROOT %cosine = f32[8]{0} cosine(%b)
}

ENTRY %main (p: pred[], x: f32[8]) -> f32[8] {
  %p = pred[] parameter(0)
  %x = f32[8]{0} parameter(1)
  %c = f32[8]{0} conditional(%p, %x, %x), true_computation=%yes, false_computation=%no
  ROOT %r = f32[8]{0} reverse(%c), dimensions={0}
}
"""


def test_branches_give_their_result_in_one_place():
    _, names = buffers(BRANCHES)

    assert {"sine", "cosine", "c"} in names

"""What kernels take for themselves, against allocations that were seen."""

import pytest

from memfit.frameworks.xla.hlo import parse
from memfit.frameworks.xla.liveness import lives_of
from memfit.frameworks.xla.scratch import Scratch, most_asked_bytes, most_bytes, scratch_of, spread_of
from tests.unit.frameworks.xla.programs import LOOP, entry

FUSED = """HloModule made, is_scheduled=true

%inside (a: f32[1], b: f32[1]) -> f32[1] {{
  %a = f32[{left}]{{0}} parameter(0)
  %b = f32[{right}]{{0}} parameter(1)
  ROOT %r = f32[{out}]{{0}} {what}
}}

ENTRY %main (a: f32[1], b: f32[1]) -> f32[1] {{
  %a.1 = f32[{left}]{{0}} parameter(0)
  %b.1 = f32[{right}]{{0}} parameter(1)
  ROOT %f = f32[{out}]{{0}} fusion(%a.1, %b.1), kind=kCustom, calls=%inside, backend_config={{"kind":"__ynn_fusion"}}
}}
"""
LABELS = "dim_labels=b01f_01io->b01f"
PARTS = 'backend_config={"outer_dimension_partitions":["2"]}'


def scratch(text: str, num_threads: int = 2) -> tuple[Scratch, ...]:
    module = parse(text)
    return scratch_of(module, lives_of(module), num_threads)


def computed(left: str, right: str, out: str, what: str) -> tuple[int, int, int]:
    """(bytes of the matrix, of the rest, that are asked for) of one instruction."""
    lines = (
        f"%a = f32[{left}]{{0}} parameter(0)",
        f"%b = f32[{right}]{{0}} parameter(1)",
        f"ROOT %r = f32[{out}]{{0}} {what}",
    )
    found = scratch(entry(*lines))
    return tuple(found[0][2:]) if found else (0, 0, 0)


@pytest.mark.parametrize(
    ("left", "right", "out", "what", "expected"),
    [
        # A padded copy of the input, and the kernel.
        (
            "32,32,32,64", "3,3,64,64", "32,32,32,64",
            f"convolution(%a, %b), window={{size=3x3 pad=1_1x1_1}}, {LABELS}",
            9469952 + 147456,
        ),
        # Two tasks, each with its own.
        (
            "32,32,32,64", "3,3,64,256", "32,32,32,256",
            f"convolution(%a, %b), window={{size=3x3 pad=1_1x1_1}}, {LABELS}",
            2 * 9469952 + 589824,
        ),
        # One row per output pixel.
        (
            "32,32,32,64", "3,3,64,64", "32,30,30,64",
            f"convolution(%a, %b), window={{size=3x3}}, {LABELS}",
            66355200 + 147456,
        ),
        ("100,128,512", "1", "128,512", "reduce(%a, %b), dimensions={0}, to_apply=%add", 26214400),
        ("100,128,512", "1", "100,512", "reduce(%a, %b), dimensions={1}, to_apply=%add", 0),
        (
            "8,64,32", "8,64,16", "8,32,16",
            "dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={1}, rhs_batch_dims={0}, rhs_contracting_dims={1}",
            8 * 64 * 16 * 4,
        ),
    ],
)  # fmt: skip
def test_what_the_fused_library_takes(left, right, out, what, expected):
    assert most_bytes(scratch(FUSED.format(left=left, right=right, out=out, what=what))) == expected


def test_products_pack_two_slices_of_their_operands():
    what = "dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"

    assert computed("1024,4096", "4096,512", "1024,512", what)[1] == 640 * 4 * (1024 + 512)
    # Of many rows, hardly any are packed at once, though all are asked for.
    assert computed("8192,4096", "4096,512", "8192,512", what)[1:] == (640 * 4 * 512, 640 * 4 * (8192 + 512))
    assert computed("4096,512", "512,1", "4096,1", what) == (0, 0, 0)


def test_products_of_many_matrices_are_one_for_each():
    what = "dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}"

    assert computed("16,512,512", "16,512,512", "16,512,512", what)[1] == 16 * 512 * 4 * 1024


def test_transposed_convolutions_multiply_first():
    what = f"convolution(%a, %b), window={{size=3x3 pad=2_1x2_1 lhs_dilate=2x2}}, {LABELS}"

    assert computed("48,8,8,256", "3,3,256,128", "48,16,16,128", what)[0] == 14155776


@pytest.mark.parametrize("rest", ["stride=2x2 lhs_dilate=2x2", "lhs_dilate=2x2 rhs_dilate=2x2"])
def test_what_is_not_a_plain_transposed_convolution_has_no_matrix(rest):
    what = f"convolution(%a, %b), window={{size=3x3 pad=1_1x1_1 {rest}}}, {LABELS}"

    assert computed("4,16,16,8", "3,3,8,8", "4,29,29,8", what)[0] == 0


def test_convolutions_with_groups_are_a_product_and_a_result_for_each():
    what = f"convolution(%a, %b), window={{size=3x3 pad=1_1x1_1}}, {LABELS}, feature_group_count=96"
    rows = 2 * 24 * 24

    _, own, asked = computed("2,24,24,96", "3,3,1,96", "2,24,24,96", what)

    # All are begun, and half have ended when the last one begins.
    assert asked == 96 * (rows * 9 * 4 + 9 * 4 + rows * 4) == 2 * own


def test_loops_that_xla_writes_itself_take_nothing():
    what = f"convolution(%a, %b), window={{size=3x3 pad=1_1x1_1}}, {LABELS}, {PARTS}"

    assert computed("4,16,16,8", "3,3,8,8", "4,16,16,8", what) == (0, 0, 0)


def test_kernels_inside_of_loops_count():
    text = LOOP.replace(
        "%sorted = f32[512]{0} concatenate(%value, %value), dimensions={0}",
        "%left = f32[1024,1024]{1,0} constant({...})\n"
        "  %sorted = f32[1024,1024]{1,0} dot(%left, %left), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    )

    assert most_bytes(scratch(text)) == 640 * 4 * 2048


def test_a_matrix_stays_while_the_next_kernel_runs():
    found = (Scratch(3, 7, 100, 5, 5), Scratch(7, 9, 0, 60, 80), Scratch(9, 12, 0, 150, 150))

    assert most_bytes(found) == 160
    assert most_bytes(()) == most_asked_bytes(()) == 0


def test_the_two_largest_may_ask_at_once():
    found = (Scratch(3, 7, 100, 5, 5), Scratch(7, 9, 0, 60, 80), Scratch(9, 12, 0, 50, 90))

    assert most_asked_bytes(found) == 105 + 90


def test_bounds_are_those_without_scratch_and_with_twice_as_much():
    assert spread_of(1000, (Scratch(0, 1, 0, 250, 250),)) == (0.75, 1.25)
    assert spread_of(1000, ()) == (0.95, 1.05)

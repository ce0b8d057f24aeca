"""How instructions run on the CPU, against allocations that were seen."""

import pytest

from memfit.adapters.xla.hlo import parse
from memfit.adapters.xla.host_kernels import Kernel, Kernels, Way
from memfit.adapters.xla.host_products import split_product
from tests.unit.adapters.xla.programs import LOOP, entry

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


def kernel_of(text: str, moved_bytes: int = 0, num_threads: int = 2) -> Kernel:
    """Of the last instruction."""
    module = parse(text)
    by_name = {one.name: one for one in module.entry.instructions}
    return Kernels(module, num_threads).of(module.entry.root, by_name, moved_bytes)


@pytest.mark.parametrize(
    ("left", "right", "out", "what", "expected"),
    [
        # A padded copy of the input.
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
        # Three images are too few to pack a kernel for.
        (
            "3,26,26,64", "24,24,64,32", "3,3,3,32",
            f"convolution(%a, %b), window={{size=24x24}}, {LABELS}",
            3 * 9 * 24 * 24 * 64 * 4,
        ),
        # Channels of a packed kernel are rounded up, to fours, eights or sixteens.
        (
            "4,26,26,64", "24,24,64,3", "4,3,3,3",
            f"convolution(%a, %b), window={{size=24x24}}, {LABELS}",
            4 * 9 * 24 * 24 * 64 * 4 + 24 * 24 * 64 * 4 * 4,
        ),
        (
            "4,26,26,64", "24,24,64,33", "4,3,3,33",
            f"convolution(%a, %b), window={{size=24x24}}, {LABELS}",
            4 * 9 * 24 * 24 * 64 * 4 + 24 * 24 * 64 * 48 * 4,
        ),
        ("100,128,512", "1", "128,512", "reduce(%a, %b), dimensions={0}, to_apply=%add", 26214400),
        ("100,128,512", "1", "100,512", "reduce(%a, %b), dimensions={1}, to_apply=%add", 0),
        (
            "8,64,32", "8,64,16", "8,32,16",
            "dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={1}, rhs_batch_dims={0}, rhs_contracting_dims={1}",
            8 * 64 * 16 * 4,
        ),
        # 64 columns a thread.
        ("1024,8192", "8192,1024", "1024,1024", "dot(%a, %b), lhs_contracting_dims={1}", 8192 * 128 * 4),
        ("64,8192", "8192,16", "64,16", "dot(%a, %b), lhs_contracting_dims={1}", 8192 * 16 * 4),
    ],
)  # fmt: skip
def test_what_the_fused_library_takes(left, right, out, what, expected):
    found = kernel_of(FUSED.format(left=left, right=right, out=out, what=what))

    assert found.way is Way.LIBRARY
    assert found.most_bytes(2) == expected


def test_transposed_convolutions_multiply_first():
    found = kernel_of(
        entry(
            "%a = f32[48,8,8,256]{3,2,1,0} parameter(0)",
            "%b = f32[3,3,256,128]{3,2,1,0} parameter(1)",
            "ROOT %r = f32[48,16,16,128]{3,2,1,0} convolution(%a, %b), "
            f"window={{size=3x3 pad=2_1x2_1 lhs_dilate=2x2}}, {LABELS}",
        )
    )

    assert (found.way, found.matrix_bytes) == (Way.PRODUCT, 14155776)


@pytest.mark.parametrize(
    ("dimensions", "window", "labels"),
    [
        # The gradient of a kernel with groups, as XLA writes it.
        (("8,32,32,8,4", "32,32,8,4,8", "8,3,3,8,8"),
         "size=32x32x8 stride=1x1x7 pad=1_1x1_1x0_0 lhs_dilate=1x1x8", "b012f_012io->b012f"),
        (("4,16,16,8", "3,3,8,8", "4,17,17,8"), "size=3x3 stride=2x2 pad=3_3x3_3 lhs_dilate=2x2", "b01f_01io->b01f"),
        (("4,16,16,8", "3,3,8,8", "4,29,29,8"), "size=3x3 pad=1_1x1_1 lhs_dilate=2x2 rhs_dilate=2x2",
         "b01f_01io->b01f"),
    ],
)  # fmt: skip
def test_what_is_not_a_plain_transposed_convolution_has_no_matrix(dimensions, window, labels):
    left, right, out = dimensions
    order = ",".join(str(place) for place in reversed(range(left.count(",") + 1)))
    found = kernel_of(
        entry(
            f"%a = f32[{left}]{{{order}}} parameter(0)",
            f"%b = f32[{right}]{{{order}}} parameter(1)",
            f"ROOT %r = f32[{out}]{{{order}}} convolution(%a, %b), window={{{window}}}, dim_labels={labels}",
        )
    )

    assert (found.way, found.matrix_bytes) == (Way.PRODUCT, 0)


def test_convolutions_with_groups_are_a_product_for_each():
    found = kernel_of(
        entry(
            "%a = f32[32,24,24,96]{3,2,1,0} parameter(0)",
            "%b = f32[3,3,1,96]{3,2,1,0} parameter(1)",
            "ROOT %r = f32[32,49,49,96]{3,2,1,0} convolution(%a, %b), "
            f"window={{size=3x3 pad=2_2x2_2 lhs_dilate=2x2}}, {LABELS}, feature_group_count=96",
        )
    )

    # THEN each packs its own rows, and has a result of its own, which is not contiguous in the output
    rows = 32 * 49 * 49
    assert (found.way, found.num_groups, found.matrix_bytes) == (Way.PRODUCT, 96, 0)
    assert found.tasks_bytes == rows * 9 * 4 + rows * 4
    assert found.asked_bytes >= found.tasks_bytes


def test_convolutions_that_xla_writes_itself_are_slow_loops():
    lines = [
        "%a = f32[24,24,64,64]{3,2,1,0} parameter(0)",
        "%b = f32[128,12,12,64]{3,2,1,0} parameter(1)",
        "ROOT %r = f32[64,3,3,128]{3,2,1,0} convolution(%a, %b), "
        "window={size=12x12 pad=1_0x1_0 rhs_dilate=2x2 rhs_reversal=1x1}, dim_labels=01fb_o01i->f01b",
    ]
    own = kernel_of(entry(*lines[:2], f"{lines[2]}, {PARTS}"))
    eigen = kernel_of(entry(*lines))

    assert (own.way, own.num_tasks, own.most_bytes(2)) == (Way.SHARED, 2, 0)
    assert own.seconds > 3 * eigen.seconds


def test_elementwise_kernels_run_in_parts_where_xla_cut_them():
    lines = ["%a = f32[8]{0} parameter(0)", "ROOT %r = f32[8]{0} exponential(%a)"]

    assert kernel_of(entry(*lines), 4000).way is Way.INLINE
    assert kernel_of(entry(lines[0], f"{lines[1]}, {PARTS}"), 4000) == Kernel(Way.SHARED, 1e-6, 2)


def test_a_loop_takes_what_the_largest_inside_takes():
    text = LOOP.replace(
        "%sorted = f32[512]{0} concatenate(%value, %value), dimensions={0}",
        "%left = f32[1024,1024]{1,0} constant({...})\n"
        "  %sorted = f32[1024,1024]{1,0} dot(%left, %left), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    )
    module = parse(text)
    loop = next(one for one in module.entry.instructions if one.opcode == "while")

    found = Kernels(module, 2).of(loop, {}, 0)

    assert found.fixed_bytes == 2 * 1024 * 512 * 4
    # THEN it asks for as much as the product does where it stands by itself
    assert found.asked_bytes == split_product(1024, 1024, 1024, 4, 2).asked_bytes >= found.fixed_bytes


@pytest.mark.parametrize(("left", "right", "out"), [("4096,512", "512,1", "4096,1"), ("1,4096", "4096,512", "1,512")])
def test_products_with_a_vector_take_nothing(left, right, out):
    found = kernel_of(
        entry(
            f"%a = f32[{left}]{{1,0}} parameter(0)",
            f"%b = f32[{right}]{{1,0}} parameter(1)",
            f"ROOT %r = f32[{out}]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}",
        ),
        moved_bytes=4000,
    )

    assert found == Kernel(Way.INLINE, 1e-6)


def test_products_of_many_matrices_are_one_for_each():
    found = kernel_of(
        entry(
            "%a = f32[16,512,512]{2,1,0} parameter(0)",
            "%b = f32[16,512,512]{2,1,0} parameter(1)",
            "ROOT %r = f32[16,512,512]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
            "rhs_batch_dims={0}, rhs_contracting_dims={1}",
        )
    )

    assert (found.way, found.num_groups) == (Way.PRODUCT, 16)
    assert found.seconds == 2 * 512**3 / 25e9


def test_of_several_convolutions_in_a_fusion_the_largest_copy_counts():
    text = FUSED.format(
        left="8,32,32,64",
        right="3,3,64,64",
        out="8,32,32,64",
        what=f"convolution(%a, %b), window={{size=3x3 pad=1_1x1_1}}, {LABELS}",
    ).replace(
        "  ROOT %r = f32[8,32,32,64]{0} convolution",
        "  %first = f32[8,30,30,64]{0} convolution(%a, %b), window={size=3x3}, dim_labels=b01f_01io->b01f\n"
        "  ROOT %r = f32[8,32,32,64]{0} convolution",
    )

    assert kernel_of(text).own_bytes == 8 * 30 * 30 * 9 * 64 * 4

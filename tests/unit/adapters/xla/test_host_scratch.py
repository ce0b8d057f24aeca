"""Scratch memory of XLA's CPU kernels, against allocations that were seen."""

import pytest

from memfit.adapters.xla.hlo import parse
from memfit.adapters.xla.host_scratch import Scratch, scratch_by_name
from tests.unit.adapters.xla.programs import entry

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
def test_fused_kernels(left, right, out, what, expected):
    found = scratch_by_name(parse(FUSED.format(left=left, right=right, out=out, what=what)))

    assert found.get("f", Scratch(0)).size_bytes == expected


def test_transposed_convolutions_multiply_first():
    text = entry(
        "%a = f32[48,8,8,256]{3,2,1,0} parameter(0)",
        "%b = f32[3,3,256,128]{3,2,1,0} parameter(1)",
        "ROOT %r = f32[48,16,16,128]{3,2,1,0} convolution(%a, %b), "
        f"window={{size=3x3 pad=2_1x2_1 lhs_dilate=2x2}}, {LABELS}",
    )

    assert scratch_by_name(parse(text))["r"].lingering_bytes == 14155776


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "expected"),
    [
        # Two slices of both operands, 320 deep at most.
        (1024, 4096, 1024, 2048 * 640 * 4),
        (3072, 1024, 1024, 4096 * 512 * 4),
        (256, 4096, 4096, 4352 * 640 * 4),
        # A sum that is one slice.
        (512, 256, 512, 1024 * 256 * 4),
        # So many rows that each thread packs its own.
        (4096, 1024, 4096, 4096 * 512 * 4),
    ],
)
def test_products_pack_slices_of_their_operands(rows, depth, columns, expected):
    text = entry(
        f"%a = f32[{depth},{rows}]{{1,0}} parameter(0)",
        f"%b = f32[{depth},{columns}]{{1,0}} parameter(1)",
        f"ROOT %r = f32[{rows},{columns}]{{1,0}} dot(%a, %b), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}",
    )

    assert scratch_by_name(parse(text))["r"].size_bytes == expected

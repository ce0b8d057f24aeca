from memfit.core.units import GIB
from memfit.reports.estimate import batches
from tests.unit.reports.builders import MYSTERY, RTX_3090


def test_the_sizes_are_in_order_and_the_chosen_one_is_marked():
    text = batches.format_batches([(64, 30 * GIB, False), (32, 16 * GIB, True), (48, 23 * GIB, True)], 32, 48, RTX_3090)

    assert text.splitlines() == [
        "Batch size 32 is safe; 48 is the limit (23.7 GiB usable on NVIDIA GeForce RTX 3090)",
        "     batch size      peak  of usable          fits",
        "  >          32  16.0 GiB        68%           yes",
        "             48  23.0 GiB        97%  at the limit",
        "             64  30.0 GiB       127%            no",
    ]


def test_what_is_unknown_is_called_so():
    text = batches.format_batches([(1, GIB, None)], None, None, MYSTERY)

    assert text.startswith("No batch size fits (unknown usable on")
    assert text.splitlines()[-1].split() == ["1", "1.00", "GiB", "unknown", "unknown"]

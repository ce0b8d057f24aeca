from dataclasses import replace

from memfit.catalogue import find_device
from memfit.core.device import Origin
from memfit.core.units import MIB
from memfit.core.verification import Measured, ModelCheck, Verification
from memfit.reports.verify.figures import format_verification, report

GOOD = ModelCheck("mlp", "fp32", 8, 102 * MIB, 198 * MIB, 0.01, 100 * MIB, 200 * MIB, 0.02)
MADE = Verification(
    find_device("t4"),
    Origin.MEASURED,
    "2026-11-18",
    Measured(context_bytes=200 * MIB, launch_seconds=5e-6, flops={"float16": 31e12}),
    (GOOD, replace(GOOD, name="cnn", measured_allocated_bytes=None, failure="no kernel \x1b[31m image")),
    num_left_out=3,
)


def test_figures_stand_beside_each_other_with_their_origin():
    text = format_verification(MADE)

    assert "predicted peaks of 1 step are at most 2.0% off" in text
    assert "+2.0%" in text and "-1.0%" in text and "20.0 ms" in text
    assert "context of a process (catalogue: 134.9 MiB (measured))" in text
    assert "31.00 TFLOP/s" in text and "5.0 us" in text
    assert "no time was left for 3 of the steps" in text


def test_a_small_error_has_no_sign_of_its_own():
    text = format_verification(replace(MADE, checks=(replace(GOOD, predicted_allocated_bytes=100 * MIB - 512),) * 2))

    assert "predicted peaks of 2 steps" in text
    assert "+0.0%" in text and "-0.0%" not in text


def test_what_was_not_measured_is_unknown_and_texts_are_escaped():
    text = format_verification(MADE)

    assert "did not run: no kernel" in text
    assert "\x1b" not in text
    assert "bandwidth" not in text


def test_a_verdict_is_good_news_only_near_the_truth():
    far = replace(GOOD, predicted_allocated_bytes=120 * MIB)

    assert report(MADE).is_good is True
    assert report(replace(MADE, checks=(far,))).is_good is False
    assert report(replace(MADE, checks=())).is_good is None
    assert report(replace(MADE, origin=Origin.SIMULATED)).is_good is None

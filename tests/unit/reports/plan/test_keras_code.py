"""The text; integration/test_plan_keras.py runs it on all backends."""

import pytest

from memfit.core.device import Device, Kind, Origin
from memfit.core.plan import Footprint, Plan, Seconds
from memfit.core.settings import Settings
from memfit.reports.plan.code import format_code


def code(backend="tensorflow", **settings):
    device = Device("cpu", "CPU", Kind.HOST, None, 1000, Origin.MEASURED)
    used = Footprint(1, 1, {})
    plan = Plan(
        "net", device, 10, 8, Settings(**settings), (), used, used, Seconds(None), Seconds(None),
        framework=f"keras:{backend}",
    )  # fmt: skip
    compile(format_code(plan), "plan", "exec")
    return format_code(plan)


@pytest.mark.parametrize(
    ("backend", "word"), [("tensorflow", "tf.while_loop"), ("torch", "value.backward()"), ("jax", "jax.lax.scan")]
)
def test_micro_batches_have_the_step_of_their_backend(backend, word):
    text = code(backend, micro_batches=3, micro_batch_size=3)
    assert word in text and "PART = 3 " in text and "MicroBatched(model.input," in text
    assert "PART = 4 " in code(backend, micro_batches=2)


def test_nothing_that_the_plan_does_not_use_is_in_it():
    text = code(jit_compile=True)
    assert "jit_compile=True" in text
    assert not any(word in text for word in ("MicroBatched", "policy", "lora", "Remat"))


def test_float16_scales_its_loss_and_bfloat16_does_not():
    assert "LossScaleOptimizer(optimizer)" in code(precision="amp-fp16")
    assert "mixed_bfloat16" in code(precision="amp-bf16") and "LossScale" not in code(precision="amp-bf16")


def test_adapters():
    text = code(lora_rank=8, quantized_base=True)
    assert "enable_lora(8)" in text and 'quantize("int8")' in text
    assert "quantize" not in code(lora_rank=8)


def test_recomputation_is_honest():
    text = code(checkpoint=("a:b", "evil'\nimport os"))
    assert "#     a:b\n" in text and "keras.remat(function)" in text
    assert not any(line.startswith("import os") for line in text.splitlines())

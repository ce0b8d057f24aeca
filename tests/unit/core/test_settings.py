import json
from dataclasses import replace

import pytest

from memfit.core.errors import BadFile, BadInput
from memfit.core.settings import OptimizerKernels, OptimizerState, Settings, Weighting

EVERYTHING = Settings(
    micro_batches=4,
    weighting=Weighting("count", "['labels']", -100, 1),
    precision="amp-bf16",
    checkpoint=("h.0", "h.1"),
    offload=("h.2",),
    cross_entropy_chunks=8,
    kernels=OptimizerKernels.FUSED,
    state=OptimizerState.EIGHT_BIT,
    step_in_backward=True,
    set_to_none=False,
    expandable_segments=True,
    channels_last=True,
    num_devices=4,
    shard_offload=True,
    lora_rank=8,
    quantized_base=True,
    freeze=("embedding",),
)


@pytest.mark.parametrize("settings", [Settings(), EVERYTHING])
def test_settings_survive_json(settings):
    assert Settings.from_json(json.loads(json.dumps(settings.to_json()))) == settings


def test_what_is_missing_has_its_default():
    assert Settings.from_json({"micro_batches": 3}) == Settings(micro_batches=3)


def test_settings_of_another_version_are_refused_by_name():
    with pytest.raises(BadFile, match="teleport"):
        Settings.from_json({"teleport": True})


def test_settings_can_be_told_apart_and_looked_up():
    assert len({Settings(), Settings(), EVERYTHING}) == 2


def test_a_weighting_is_one_of_four():
    with pytest.raises(BadInput, match="'tokens' was given"):
        Weighting("tokens")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("micro_batches", "four"),
        ("micro_batches", -1),
        ("num_devices", None),
        ("checkpoint", "blocks.0"),
        ("step_in_backward", "yes"),
        ("lora_rank", True),
    ],
)
def test_values_that_nobody_writes_are_refused_by_name(name, value):
    with pytest.raises(BadFile, match=f"the setting {name} is"):
        Settings.from_json({name: value})


def test_the_passes_of_settings_know_nothing_of_the_update():
    passes = Settings(micro_batches=2, checkpoint=("a",), precision="amp-bf16")
    update = {"kernels": OptimizerKernels.FUSED, "state": OptimizerState.HOST, "step_in_backward": True}

    assert replace(passes, **update, set_to_none=False).of_passes == passes
    assert passes.of_passes == passes


def test_settings_ask_for_parts_by_number_or_by_size():
    assert not Settings().splits
    assert Settings(micro_batches=2).splits
    assert Settings(micro_batch_size=8).splits


@pytest.mark.parametrize(("parts", "samples", "size"), [(3, 10, 4), (3, 9, 3), (20, 5, 1), (2, 1, 1)])
def test_as_many_parts_as_asked_for_or_one_for_each_sample(parts, samples, size):
    assert Settings(micro_batches=parts).part_size(samples) == size


def test_the_size_of_a_part_holds_whatever_the_batch():
    assert Settings(micro_batches=2, micro_batch_size=3).part_size(100) == 3

import importlib.util

import pytest

import memfit
from memfit.api.jobs import named_optimizer
from memfit.commands import targets
from memfit.core.errors import BadInput
from memfit.core.timeline import Category


def test_a_named_job_can_be_estimated():
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    job = memfit.named_job("timm:resnet18", optimizer="sgd", image_size=64)
    estimate = memfit.estimate(job, device="rtx-3090", batch_size=2)

    assert estimate.subject == "timm:resnet18 (64 x 64 pixels)"
    assert estimate.batch_size == 2
    assert estimate.num_parameters == 11_689_512
    assert not any(block.category is Category.OPTIMIZER_STATE for block in estimate.timeline.blocks)


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("resnet18", {}, "'resnet18' names no model; write timm:NAME, torchvision:NAME, keras:NAME or hf:NAME"),
        ("timm:resnet18", {"optimizer": "adagard"}, "optimizer must be one of none, sgd.*, but 'adagard' was given"),
        ("timm:resnet18", {"image_size": 0}, "image_size must be at least 1, but 0 was given"),
        ("hf:gpt2", {"sequence_length": -5}, "sequence_length must be at least 1, but -5 was given"),
    ],
)
def test_a_bad_name_is_refused(target, options, message):
    with pytest.raises(BadInput, match=message):
        memfit.named_job(target, **options)


def test_the_command_line_offers_every_named_optimizer():
    from memfit.frameworks.torch.trace import named

    assert list(named.OPTIMIZERS) == list(targets.OPTIMIZERS)
    assert named_optimizer("none") is None

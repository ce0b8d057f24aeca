import importlib.util
import json

import pytest
import torch

from memfit.adapters.torch import named
from memfit.adapters.torch.job import open_job
from memfit.adapters.torch.named import named_job, named_optimizer
from memfit.adapters.torch.stand_in import build_without_weights
from memfit.core.errors import BadInput, BadTarget, MissingDependency
from memfit.core.job import OPTIMIZERS
from memfit.core.timeline import Category
from tests.unit.adapters.torch.builders import AMPERE


def needs(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


TINY_BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}


def job_of(target, optimizer="sgd", sequence_length=None, image_size=None):
    return named_job(target, optimizer, sequence_length, image_size)


def shapes_of(job, count=2):
    batch = job.batch(count)
    parts = batch.values() if isinstance(batch, dict) else batch
    return [tuple(tensor.shape) for tensor in parts]


@pytest.mark.parametrize("target", ["resnet50", "timm", "timm:", "foo:resnet50", ":resnet50"])
def test_what_names_no_model(target):
    with pytest.raises(BadTarget, match="names no model; write timm:NAME"):
        job_of(target)


@needs("timm", "transformers")
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("timm:resnet5O", "timm has no model 'resnet5O'. Did you mean resnet50"),
        ("torchvision:resnet5", "torchvision has no classifier 'resnet5'. Did you mean resnet50"),
        ("hf:GPT2LMHeadModl", "'GPT2LMHeadModl' is neither .* Did you mean GPT2LMHeadModel"),
        ("hf:gpt3", "'gpt3' is neither a model class .* Did you mean .*gpt2"),
        ("hf:path/to/nothing.json", "is neither a model class of transformers"),
    ],
)
def test_a_wrong_name_suggests_the_nearest(target, message):
    with pytest.raises(BadTarget, match=message):
        job_of(target)


@needs("timm")
def test_a_name_like_no_other_suggests_nothing():
    with pytest.raises(BadTarget) as caught:
        job_of("timm:qqqqqqqqqqqqqqqqqqqq")
    assert "Did you mean" not in str(caught.value)


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(BadInput, match=r"must be one of none, sgd, .* but 'lion' was given"):
        job_of("timm:resnet18", optimizer="lion")


def test_a_package_that_is_missing_says_how_to_install_it():
    with pytest.raises(MissingDependency, match=r"no_such_package can't be imported .*pip install no_such_package"):
        named._import("no_such_package")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_named_optimizer_can_be_made(name):
    make = named_optimizer(name)
    if name == "none":
        assert make is None
        return
    made = make([torch.nn.Parameter(torch.ones(2, 2))])
    assert isinstance(made, torch.optim.Optimizer)
    if name == "sgd-momentum":
        assert made.defaults["momentum"] == 0.9


@needs("timm")
def test_a_model_of_timm():
    job = job_of("timm:resnet18", "adamw")

    assert job.name == "timm:resnet18 (224 x 224 pixels)"
    assert job.optimizer is torch.optim.AdamW
    assert shapes_of(job) == [(2, 3, 224, 224), (2,)]


@needs("timm")
def test_a_model_of_timm_at_its_own_size_and_at_another():
    assert shapes_of(job_of("timm:vit_tiny_patch16_384"))[0] == (2, 3, 384, 384)
    job = job_of("timm:vit_tiny_patch16_224", image_size=64)
    assert shapes_of(job)[0] == (2, 3, 64, 64)
    # The transformer is built for the smaller grid: 4 x 4 patches and a class token.
    assert build_without_weights(job.model).pos_embed.shape[1] == 17


@needs("timm")
def test_a_constructor_with_drop_path_rates_works():
    timm = named._import("timm")

    model = build_without_weights(lambda: timm.create_model("convnext_atto", drop_path_rate=0.2))

    assert next(model.parameters()) is not None
    assert any(p.is_meta for p in model.parameters())


@needs("timm")
def test_a_model_of_torchvision():
    job = job_of("torchvision:resnet18", image_size=32)

    traced = open_job(job, AMPERE, batch_size=2).trace(None)

    assert traced.num_parameters == 11_689_512
    assert traced.notes == ()


@pytest.fixture
def tiny_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY_BERT))
    return path


@needs("transformers")
def test_a_configuration_file_of_transformers(tiny_config):
    job = job_of(f"hf:{tiny_config}", "adam", sequence_length=8)

    assert shapes_of(job, 3) == [(3, 8), (3, 8)]
    traced = open_job(job, AMPERE, batch_size=3).trace(None)
    state = sum(
        b.size_bytes
        for b in traced.timeline.live_at(traced.timeline.num_ticks - 1)
        if b.category is Category.OPTIMIZER_STATE
    )
    assert state == 2 * traced.parameter_bytes


@needs("transformers")
def test_the_usual_length_is_what_the_model_has_room_for(tiny_config):
    assert shapes_of(job_of(f"hf:{tiny_config}"))[0] == (2, 64)


@needs("transformers")
def test_a_sequence_longer_than_the_model_is_refused(tiny_config):
    with pytest.raises(BadInput, match=r"length of 65 was given, but .* has 64 positions"):
        job_of(f"hf:{tiny_config}", sequence_length=65)


@needs("transformers")
def test_a_file_that_is_no_configuration_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{}")

    with pytest.raises(BadTarget, match="not a configuration that transformers can read"):
        job_of(f"hf:{path}")


@needs("transformers")
def test_a_class_and_a_type_of_transformers():
    assert shapes_of(job_of("hf:GPT2LMHeadModel", sequence_length=16)) == [(2, 16), (2, 16)]
    assert shapes_of(job_of("hf:gpt2", sequence_length=16))[0] == (2, 16)
    assert shapes_of(job_of("hf:ViTForImageClassification")) == [(2, 3, 224, 224), (2,)]

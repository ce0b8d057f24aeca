import importlib.util
import json
from pathlib import Path

import pytest
import torch

import memfit
from memfit.core.errors import BadInput, BadTarget, MissingDependency
from memfit.core.job import OPTIMIZERS
from memfit.core.timeline import Category
from memfit.frameworks.torch.adapter import open_job
from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators
from memfit.frameworks.torch.shapes.stand_in import build_without_weights
from memfit.frameworks.torch.trace import named
from memfit.frameworks.torch.trace.named import hub_config, hub_names, named_job, named_optimizer
from tests.unit.frameworks.torch.builders import AMPERE


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


transformers = pytest.importorskip("transformers")
define_missing_operators()

# Parameters that the models' own pages give, rounded as there.
PUBLISHED = json.loads(Path(__file__).with_name("hub_parameters.json").read_text(encoding="utf-8"))


def num_parameters(name):
    config = hub_config(transformers, name)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    model.tie_weights()
    count = sum(p.numel() for p in model.parameters())
    if config.model_type == "mt5" or (config.model_type == "t5" and not config.scale_decoder_outputs):
        # Published with a head of its own; transformers 5 ties it to the embedding.
        count += config.vocab_size * config.d_model
    return count


def check(names):
    built = {name: num_parameters(name) for name in names}
    assert {name: count for name, count in built.items() if abs(count / PUBLISHED[name] - 1) > 0.005} == {}


def test_parameters_are_those_that_were_published():
    check(list(PUBLISHED)[::40])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # DeBERTa's code in transformers
def test_parameters_of_every_model_are_those_that_were_published():
    check(PUBLISHED)


def test_every_shipped_configuration_is_checked_and_found_by_its_short_name():
    names = hub_names()
    assert len(names) == len({name.lower() for name in names}) >= 100
    assert PUBLISHED.keys() <= set(names)
    for name in names:
        # A short name that two models share would give one of them the other's configuration.
        assert hub_config(transformers, name).to_dict() == hub_config(transformers, name.rpartition("/")[2]).to_dict()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("bert-base-uncased", "BertForMaskedLM, 512 tokens"),
        ("BERT-Base-Uncased", "BertForMaskedLM, 512 tokens"),
        ("gpt2-medium", "GPT2LMHeadModel, 512 tokens"),
        ("openai/whisper-tiny", "WhisperForConditionalGeneration, 3000 frames of sound, 448 tokens"),
        ("openai/clip-vit-large-patch14-336", "CLIPModel, 336 x 336 pixels, 77 tokens"),
        ("google/flan-t5-small", "T5ForConditionalGeneration, 512 tokens"),
    ],
)
def test_names_that_people_type(name, shown):
    assert named_job(f"hf:{name}", "adamw", None, None).name == f"hf:{name} ({shown})"


@pytest.mark.parametrize("name", ["openai/whisper-tiny", "openai/clip-vit-base-patch32", "google/flan-t5-small"])
def test_models_that_take_more_than_tokens_are_estimated(name):
    estimate = memfit.estimate(memfit.named_job(f"hf:{name}"), batch_size=1, device="t4")

    assert estimate.fits


def test_a_configuration_in_the_local_cache_of_the_hub(tmp_path, monkeypatch):
    # GIVEN what a download leaves behind
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--acme--tiny"
    snapshot = folder / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(snapshot.name)
    fields = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 1, "n_head": 2}
    (snapshot / "config.json").write_text(json.dumps(fields))

    # WHEN it is named
    job = named_job("hf:acme/tiny", "adamw", None, None)

    # THEN the model is that one
    assert job.name == "hf:acme/tiny (GPT2LMHeadModel, 512 tokens)"
    assert job.model().config.n_embd == 32

    # AND one that can't be read is refused, not downloaded
    (snapshot / "config.json").write_text("{")
    with pytest.raises(BadTarget, match="acme/tiny is not a configuration that transformers can read"):
        named_job("hf:acme/tiny", "adamw", None, None)


def test_an_unknown_model_suggests_the_nearest():
    with pytest.raises(BadTarget, match=r"nor a model of the Hub that memfit knows .* Did you mean .*gpt2-medium"):
        named_job("hf:gpt2-mediun", "adamw", None, None)

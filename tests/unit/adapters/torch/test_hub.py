"""Models of the Hub by their names, on a machine without the network."""

import json
from pathlib import Path

import pytest
import torch

import memfit
from memfit.adapters.torch.hub import hub_config, hub_names
from memfit.adapters.torch.named import named_job
from memfit.adapters.torch.torchvision_operators import define_missing_operators
from memfit.core.errors import BadTarget

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

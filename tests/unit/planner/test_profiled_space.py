"""Which moves make sense for a step. What comes of them is tested through the verb, in test_plan.py."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.core.errors import BadInput
from memfit.core.job import AUTOCASTS, Job
from memfit.core.settings import OptimizerState, Settings
from memfit.frameworks.torch.trace.job import OpenJob
from memfit.frameworks.torch.trace.subject import Subject
from memfit.planner.driver import Question
from memfit.planner.moves import KEEPS, allowed_moves
from memfit.planner.profiled_space import ProfiledSpace, frozen_parts


class Language(nn.Module):
    def __init__(self, vocabulary=9000, width=32):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def next_token(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def classify(model, batch):
    return F.cross_entropy(model(batch[0]).mean((2, 3)), batch[1])


LANGUAGE = Job(Language(), next_token, torch.randint(9000, (8, 16)), optimizer=torch.optim.AdamW)
IMAGES = Job(
    nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 10, 3)),
    classify,
    (torch.randn(4, 3, 16, 16), torch.randint(10, (4,))),
    optimizer=torch.optim.SGD,
)


def open_space(job, allow=("exact", "rounding"), device="a100-40gb", count=1, auto=False, forced=None, measure=False):
    target = memfit.find_device(device)
    subject = Subject(OpenJob(job, target))
    own = job.precision if job.precision in AUTOCASTS else None
    plain = Settings(set_to_none=job.set_to_none, precision=own)
    question = Question(None, target, allowed_moves(allow), plain, "torch", num_devices=count)
    opening = ProfiledSpace(subject, question, job, forced or ("auto" if auto else "keep"), measure)
    return opening.space(), opening


def ways(space):
    return [variant.settings for variant in space.variants]


def test_the_step_as_it_is_comes_first():
    space, _ = open_space(LANGUAGE)
    assert ways(space)[0] == Settings()
    assert space.optimizers[0] == Settings()


@pytest.mark.filterwarnings("ignore")
def test_the_best_precision_is_compiled_where_that_is_asked_for():
    for auto, precision in ((False, None), (True, "amp-bf16")):
        space, _ = open_space(IMAGES, allow=("exact", "rounding", "compile"), auto=auto)
        (compiled,) = (variant for variant in space.variants if variant.settings.compile)
        assert compiled.settings == Settings(compile=True, precision=precision)
        assert any(work.is_compiled for work in compiled.memory.profile.work)
    space, opening = open_space(IMAGES, allow=("exact", "compile"), count=2)
    assert not any(way.compile for way in ways(space))
    assert [one.reason for one in opening.refused if one.name == "compile"] == [
        "sharded modules are planned uncompiled"
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("budget", "scales"), [("1GiB", False), ("1MiB", True)])
def test_another_size_is_compiled_only_where_parts_may_be_needed(budget, scales):
    job = Job(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), lambda m, x: m(x).sum(), torch.randn(4096, 64))
    space, _ = open_space(job, allow=("exact", "rounding", "compile"), device=f"{budget}")
    (compiled,) = (variant for variant in space.variants if variant.settings.compile)
    assert compiled.memory.scales is scales


def test_a_large_vocabulary_may_be_chunked():
    chunks = [way.cross_entropy_chunks for way in ways(open_space(LANGUAGE)[0])]
    assert chunks[0] == 0 and any(chunks)
    assert not any(way.cross_entropy_chunks for way in ways(open_space(IMAGES)[0]))


def test_autocast_is_tried_only_on_request_and_by_the_device_s_width():
    assert not any(way.precision for way in ways(open_space(IMAGES)[0]))
    assert "amp-bf16" in {way.precision for way in ways(open_space(IMAGES, auto=True)[0])}
    assert "amp-fp16" in {way.precision for way in ways(open_space(IMAGES, auto=True, device="t4")[0])}


def test_channels_last_comes_with_16_bits():
    found = [way for way in ways(open_space(IMAGES, auto=True)[0]) if way.channels_last]
    assert found and all(way.precision for way in found)
    assert not any(way.channels_last for way in ways(open_space(IMAGES)[0]))


def test_what_changes_training_is_tried_when_it_is_named():
    found = ways(open_space(LANGUAGE, ("lora", "freeze"))[0])
    assert any(way.lora_rank for way in found) and any(way.freeze for way in found)
    assert not any(way.lora_rank or way.freeze for way in ways(open_space(LANGUAGE)[0]))


def test_parts_are_frozen_from_the_input_on():
    target = memfit.find_device("cpu")
    profile = Subject(OpenJob(LANGUAGE, target)).profile(8, Settings())
    found = frozen_parts(profile)
    assert found[0] == ("embedding", "blocks.0")
    assert found[-1] == ("embedding", "blocks.0", "blocks.1", "blocks.2")


def test_the_host_has_nothing_to_offload_to():
    on_host, _ = open_space(LANGUAGE, device="cpu")
    on_gpu, _ = open_space(LANGUAGE)
    assert on_gpu.offload and not on_host.offload
    host = Settings(state=OptimizerState.HOST)
    assert host in on_gpu.optimizers and host not in on_host.optimizers


def test_shards_may_wait_on_the_host():
    space, _ = open_space(LANGUAGE, count=2)
    assert space.base.num_devices == 2
    assert Settings(shard_offload=True) in space.optimizers


def test_zeroed_gradients_are_freed_if_that_is_allowed():
    job = Job(LANGUAGE.model, next_token, LANGUAGE.batch, optimizer=torch.optim.AdamW, set_to_none=False)
    assert open_space(job)[0].base.set_to_none
    assert not open_space(job, ("checkpoint",))[0].base.set_to_none


def test_what_cannot_be_measured_is_told():
    with pytest.raises(BadInput, match="can't be measured"):
        open_space(LANGUAGE, measure=True)


def test_a_device_of_unknown_speed_is_noted():
    _, opening = open_space(LANGUAGE, device="24GiB")
    assert [note.code for note in opening.notes].count("speed-assumed") == 1


def test_every_name_of_a_move_here_is_one():
    space, _ = open_space(LANGUAGE, tuple(KEEPS), auto=True)
    assert len(space.variants) > 6


def test_shared_and_frozen_parameters_are_noted():
    model = Language()
    model.head.weight = model.embedding.weight
    model.blocks[0].requires_grad_(False)
    job = Job(model, next_token, LANGUAGE.batch, optimizer=torch.optim.AdamW)
    _, opening = open_space(job)
    notes = {note.code: note.text for note in opening.notes}
    assert "one gradient and one state" in notes["shared-parameters"]
    assert notes["frozen-parameters"].startswith("1,056 of ")
    assert not {"shared-parameters", "frozen-parameters"} & {note.code for note in open_space(LANGUAGE)[1].notes}

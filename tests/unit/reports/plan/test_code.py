"""The programs are run: whatever the settings, two steps leave the same weights as two plain ones."""

import ast
import copy
import dataclasses

import pytest

from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import BadInput
from memfit.core.settings import OptimizerKernels, OptimizerState, Settings, Weighting
from memfit.reports.plan.code import format_code
from tests.unit.reports.builders import Recorder, make_estimate, make_timeline
from tests.unit.reports.plan_builders import make_easy_plan, make_plan

torch = pytest.importorskip("torch")
F = torch.nn.functional

CPU = Device("cpu", "This machine", Kind.HOST, None, None, Origin.ASSUMED)
BLOCKS = ("1", "3")
COUNT = Weighting("count", "['labels']", ignored=-100, skipped=1)


def code_of(settings, **changes):
    return format_code(make_plan(settings=settings, device=CPU, **changes))


def functions(settings, **changes):
    text = code_of(settings, **changes)
    assert "memfit" not in text
    found = {}
    exec(compile(text, "<plan>", "exec"), found)
    return found


def make_block(width):
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width))


def make_model():
    torch.manual_seed(0)
    parts = [torch.nn.Linear(6, 8), make_block(8), torch.nn.Tanh(), make_block(8), torch.nn.Linear(8, 3)]
    return torch.nn.Sequential(*parts).double()


def make_batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield (
            torch.randn(7, 6, dtype=torch.float64, generator=generator),
            torch.randn(7, 3, dtype=torch.float64, generator=generator),
        )


def mean_loss(model, batch):
    inputs, wanted = batch
    return F.mse_loss(model(inputs), wanted)


def sum_loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum")


def weighted_loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1]), len(batch[0])


def run_plain(model, optimizer, loss, batches):
    values = []
    for batch in batches:
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(value.detach())
    return values


def assert_same(settings, loss=mean_loss, plain_loss=None, model=None, batches=None, make_optimizer=torch.optim.AdamW):
    """The program of `settings` leaves what plain steps leave."""
    model = make_model() if model is None else model
    batches = list(make_batches()) if batches is None else batches
    plain = copy.deepcopy(model)
    expected = run_plain(plain, make_optimizer(plain.parameters(), lr=0.01), plain_loss or loss, batches)

    made = functions(settings)
    fitted, optimizer = made["prepare"](model, make_optimizer(model.parameters(), lr=0.01))
    found = [made["step"](fitted, optimizer, loss, batch) for batch in batches]

    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(fitted.state_dict(), plain.state_dict(), rtol=1e-11, atol=1e-12)
    return fitted, optimizer


HOST, SINGLE, FUSED = OptimizerState.HOST, OptimizerKernels.SINGLE, OptimizerKernels.FUSED


@pytest.mark.parametrize(
    "settings",
    [
        Settings(micro_batches=3),
        Settings(micro_batches=7, checkpoint=BLOCKS),
        Settings(micro_batches=50),
        Settings(checkpoint=BLOCKS),
        Settings(offload=BLOCKS),
        Settings(checkpoint=("1",), offload=BLOCKS),
        Settings(kernels=SINGLE),
        Settings(kernels=FUSED),
        Settings(set_to_none=False),
        Settings(step_in_backward=True),
        Settings(step_in_backward=True, kernels=SINGLE, checkpoint=("3",)),
        Settings(state=HOST),
        Settings(state=HOST, set_to_none=False, micro_batches=2),
        Settings(state=HOST, micro_batches=2, offload=("1",)),
        Settings(expandable_segments=True, micro_batches=2),
        Settings(channels_last=True),
        Settings(cross_entropy_chunks=4),
    ],
    ids=lambda settings: "-".join(f"{k}={v}" for k, v in settings.to_json().items() if v != Settings().to_json()[k]),
)
@pytest.mark.filterwarnings("ignore:.*expandable_segments.*")
def test_programs_leave_what_plain_steps_leave(settings, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    assert_same(settings)


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_other_optimizers(make_optimizer):
    assert_same(Settings(step_in_backward=True), make_optimizer=make_optimizer)
    assert_same(Settings(state=HOST, kernels=SINGLE), make_optimizer=make_optimizer)


def test_the_model_is_compiled_after_everything_that_changes_it(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda forward: lambda *given: 2 * forward(*given))
    program = functions(Settings(compile=True, freeze=("0",)))
    model, x = make_model(), torch.ones(2, 6, dtype=torch.float64)
    plain = model(x)
    made, _ = program["prepare"](model, None)
    assert torch.equal(made(x), 2 * plain)


def test_wrong_weights_would_be_seen():
    """The comparison can fail: a mean over micro-batches that adds up as a sum doesn't pass."""
    with pytest.raises(AssertionError):
        assert_same(Settings(micro_batches=3, weighting=Weighting("sum")))


def test_parts_of_a_sum_add_up():
    assert_same(Settings(micro_batches=3, weighting=Weighting("sum")), loss=sum_loss)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kernels", [OptimizerKernels.KEEP, SINGLE])
def test_a_loss_may_give_its_weight(count, kernels):
    settings = Settings(micro_batches=count, weighting=Weighting("given"), checkpoint=("1",), kernels=kernels)
    assert_same(settings, loss=weighted_loss, plain_loss=mean_loss)


@pytest.mark.parametrize("weighting", [Weighting(), Weighting("sum"), Weighting("given")])
def test_parts_of_a_batch_of_another_size_are_no_larger(weighting):
    # GIVEN a plan for batches of 6 in 3 parts, and batches of 7, 1, 4 and 9 samples
    settings = Settings(micro_batches=3, micro_batch_size=2, weighting=weighting)
    generator = torch.Generator().manual_seed(4)
    sizes = (7, 1, 4, 9)
    batches = [tuple(torch.randn(n, w, dtype=torch.float64, generator=generator) for w in (6, 3)) for n in sizes]
    seen = []
    losses = {"samples": mean_loss, "sum": sum_loss, "given": weighted_loss}

    def loss(model, batch):
        seen.append(len(batch[0]))
        return losses[weighting.kind](model, batch)

    plain_loss = sum_loss if weighting.kind == "sum" else mean_loss
    assert_same(settings, loss=loss, plain_loss=plain_loss, batches=batches)

    assert seen == [2, 2, 2, 1, 1, 2, 2, 2, 2, 2, 2, 1]


@pytest.mark.parametrize("settings", [Settings(checkpoint=BLOCKS), Settings(micro_batches=3, offload=("1",))])
def test_an_optimizer_that_searches_gets_its_closure(settings):
    def make_optimizer(parameters, lr):
        return torch.optim.LBFGS(parameters, lr=lr, max_iter=3)

    model, plain, batches = make_model(), make_model(), list(make_batches())
    made = functions(settings)
    model, optimizer = made["prepare"](model, make_optimizer(model.parameters(), 0.1))
    plain_optimizer = make_optimizer(plain.parameters(), 0.1)
    for batch in batches:

        def closure(batch=batch):
            plain_optimizer.zero_grad()
            value = mean_loss(plain, batch)
            value.backward()
            return value

        expected = plain_optimizer.step(closure)
        torch.testing.assert_close(made["step"](model, optimizer, mean_loss, batch), expected.detach())

    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    assert optimizer.state[model[0].weight]["func_evals"] > len(batches)


def test_counters_of_earlier_steps_follow_fused_kernels():
    text = format_code(make_plan(settings=Settings(kernels=FUSED)))

    assert 'state["step"] = state["step"].to(parameter.device)' in text
    assert "state" not in code_of(Settings(kernels=SINGLE))
    # The lines do no harm to a state that is where it should be.
    found = {}
    exec(compile(text, "<plan>", "exec"), found)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    run_plain(model, optimizer, mean_loss, list(make_batches())[:2])
    found["prepare"](model, optimizer)
    assert optimizer.state[model[0].weight]["step"] == 2


def make_language_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(11, 8), make_block(8), torch.nn.Linear(8, 11)).double()


def token_loss(model, batch):
    logits = model(batch["tokens"])[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def make_token_batches():
    generator = torch.Generator().manual_seed(2)
    for _ in range(2):
        labels = torch.randint(0, 11, (6, 5), generator=generator)
        labels[0, 2:] = -100
        # One micro-batch of three in which nothing counts but what the shift leaves out.
        labels[2:4, 1:] = -100
        yield {"tokens": torch.randint(0, 11, (6, 5), generator=generator), "labels": labels, "scale": 2.0}


def test_tokens_count_by_what_is_not_ignored():
    assert_same(
        Settings(micro_batches=3, weighting=COUNT),
        loss=token_loss,
        model=make_language_model(),
        batches=list(make_token_batches()),
    )


def make_normalized():
    torch.manual_seed(0)
    # A bias before batch norm has a gradient of mere rounding, which Adam would make as large as any other.
    convolution = torch.nn.Conv2d(3, 4, 3, padding=1, bias=False)
    block = torch.nn.Sequential(convolution, torch.nn.BatchNorm2d(4), torch.nn.ReLU())
    return torch.nn.Sequential(block, torch.nn.Flatten(), torch.nn.Linear(4 * 25, 2)).double()


def make_images():
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(5, 3, 5, 5, dtype=torch.float64, generator=generator)
    return [(images, torch.randn(5, 2, dtype=torch.float64, generator=generator))] * 2


@pytest.mark.parametrize("channels_last", [False, True])
def test_batch_norm_counts_a_batch_once(channels_last):
    model, _ = assert_same(
        Settings(checkpoint=("0",), channels_last=channels_last), model=make_normalized(), batches=make_images()
    )

    assert model[0][1].num_batches_tracked == 2


def test_without_batch_norm_the_program_is_shorter():
    record = Recorder()
    record.marks.extend(make_timeline().marks[:1])
    without = make_estimate(record.timeline())

    text = code_of(Settings(checkpoint=BLOCKS), estimate_before=without)
    assert "statistics_kept" not in text
    assert "statistics_kept" in code_of(Settings(checkpoint=BLOCKS))
    assert "statistics_kept" in code_of(Settings(checkpoint=BLOCKS), estimate_before=None)


def test_frozen_modules_keep_their_weights():
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    made = functions(Settings(freeze=("0", "1"), step_in_backward=True))
    model, optimizer = made["prepare"](model, torch.optim.AdamW(model.parameters()))
    made["step"](model, optimizer, mean_loss, next(make_batches()))

    changed = {name.split(".")[0] for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"3", "4"}


@pytest.mark.parametrize("precision", ["amp-bf16", "amp-fp16"])
@pytest.mark.parametrize("count", [1, 2])
def test_mixed_precision_trains(precision, count):
    """Autocast rounds, so that only the loss can be compared; its weights are float32."""
    model = make_model().float()
    inputs, wanted = (tensor.float() for tensor in next(make_batches()))
    seen = []

    def loss(model, batch):
        outputs = model(batch[0])
        seen.append(outputs.dtype)
        return F.mse_loss(outputs.float(), batch[1])

    made = functions(Settings(precision=precision, micro_batches=count))
    if precision == "amp-fp16":
        # The first scale of 65536 overflows float16 even here, and the first step would be skipped.
        made["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    model, optimizer = made["prepare"](model, torch.optim.AdamW(model.parameters(), lr=0.01))
    plain = mean_loss(model, (inputs, wanted)).item()
    values = [made["step"](model, optimizer, loss, (inputs, wanted)).item() for _ in range(8)]

    assert set(seen) == {torch.bfloat16 if precision == "amp-bf16" else torch.float16}
    assert values[0] == pytest.approx(plain, rel=0.02)
    assert values[-1] < 0.9 * values[0]


def test_mixed_precision_is_that_of_the_device():
    text = format_code(make_plan(settings=Settings(precision="amp-fp16")))

    assert 'torch.autocast("cuda", torch.float16)' in text
    assert 'torch.amp.GradScaler("cuda")' in text


@pytest.mark.parametrize("bias", [None, "bias"])
def test_chunked_cross_entropy_is_the_whole_one(bias):
    torch.manual_seed(0)
    hidden = torch.randn(10, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    shift = None if bias is None else torch.randn(7, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, 2, -100, 4, 5, -100, 0, 1, 2, 3])
    tensors = [tensor for tensor in (hidden, weight, shift) if tensor is not None]
    expected = F.cross_entropy(F.linear(hidden, weight, shift), labels)
    found = functions(Settings(cross_entropy_chunks=3))["chunked_cross_entropy"](hidden, weight, labels, shift)

    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    gradients = torch.autograd.grad(found, tensors), torch.autograd.grad(expected, tensors)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


def test_offload_lets_weights_stay():
    made = functions(Settings(offload=("1",)))
    model, _ = made["prepare"](make_model(), torch.optim.SGD([torch.zeros(1)]))
    weights = {p.data_ptr() for p in model.parameters()}
    copied = []
    empty = torch.empty

    def watched(*arguments, **options):
        made_tensor = empty(*arguments, **options)
        copied.append(tuple(made_tensor.shape))
        return made_tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", watched)
        mean_loss(model, next(make_batches())).backward()

    assert weights
    assert copied
    assert all(shape == (7, 8) for shape in copied)


def test_what_is_saved_twice_waits_once():
    made = functions(Settings(offload=("1",)))
    model = make_model()
    # Both linear layers save the input that they share, and so does the product.
    shared = torch.nn.ModuleDict({"a": torch.nn.Linear(8, 8), "b": torch.nn.Linear(8, 8)}).double()
    shared.forward = lambda x: shared["a"](x) * shared["b"](x) * x
    model[1] = shared
    fitted, _ = made["prepare"](model, torch.optim.SGD([torch.zeros(1)]))
    copied = []
    with pytest.MonkeyPatch.context() as patch:
        empty = torch.empty
        patch.setattr(torch, "empty", lambda *a, **k: copied.append(a) or empty(*a, **k))
        mean_loss(fitted, next(make_batches())).backward()

    # The input, what both layers give, and their product.
    assert len(copied) == 4


@dataclasses.dataclass
class Samples:
    inputs: torch.Tensor
    wanted: torch.Tensor
    name: str = "all"


def samples_loss(model, batch):
    assert batch.name == "all"
    return F.mse_loss(model(batch.inputs), batch.wanted)


def test_batches_may_be_dataclasses():
    batches = [Samples(*batch) for batch in make_batches()]

    assert_same(Settings(micro_batches=3), loss=samples_loss, batches=batches)
    # Whole, but placed.
    assert_same(Settings(channels_last=True), loss=samples_loss, batches=batches)


def test_state_that_is_there_moves_to_the_host():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plain, batches = copy.deepcopy(model), list(make_batches())
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    run_plain(plain, plain_optimizer, mean_loss, batches)
    run_plain(model, optimizer, mean_loss, batches[:1])

    made = functions(Settings(state=HOST))
    model, optimizer = made["prepare"](model, optimizer)
    for batch in batches[1:]:
        made["step"](model, optimizer, mean_loss, batch)

    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-13)


def test_schedules_still_work():
    """The learning rate is that of the optimizer's group at the moment of the update."""
    model, plain = make_model(), make_model()
    made = functions(Settings(step_in_backward=True))
    model, optimizer = made["prepare"](model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number, batch in enumerate(make_batches()):
        for group in (*optimizer.param_groups, *plain_optimizer.param_groups):
            group["lr"] = 0.1 / (1 + number)
        made["step"](model, optimizer, mean_loss, batch)
        run_plain(plain, plain_optimizer, mean_loss, [batch])

    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(num_devices=4), ['mesh = init_device_mesh("cpu", (4,))', "torchrun --nproc-per-node 4"]),
        (Settings(num_devices=2, shard_offload=True), ["offload_policy=CPUOffloadPolicy()"]),
        (Settings(lora_rank=8), ["LoraConfig(r=8, lora_alpha=8, target_modules=linear[:-1])"]),
        (Settings(lora_rank=8, quantized_base=True), ["load_in_4bit=True"]),
        (Settings(state=OptimizerState.EIGHT_BIT), ["bitsandbytes.optim", "8bit", "taken before are forgotten"]),
        (Settings(expandable_segments=True), ["expandable_segments:True"]),
    ],
)
def test_what_cannot_run_here_is_written(settings, expected):
    text = code_of(settings)

    ast.parse(text)
    assert all(part in text for part in expected)


def test_adapters_alone_are_trained():
    # It imports transformers, and that torchvision, whose operators must be there.
    from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators

    define_missing_operators()
    pytest.importorskip("peft")
    model, batches = make_model(), list(make_batches())
    before, expected = copy.deepcopy(model.state_dict()), mean_loss(model, batches[0]).item()
    made = functions(Settings(lora_rank=2, checkpoint=BLOCKS, step_in_backward=True))
    model, optimizer = made["prepare"](model, torch.optim.AdamW(model.parameters(), lr=0.05))
    values = [made["step"](model, optimizer, mean_loss, batches[0]).item() for _ in range(5)]

    assert values[0] == pytest.approx(expected, rel=1e-12)
    assert values[-1] < values[0]
    after = model.merge_and_unload().state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed
    assert all(name.endswith("weight") and not name.startswith("4.") for name in changed)


@pytest.mark.parametrize("in_backward", [False, True])
def test_eight_bit_states(in_backward):
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    # Smaller parameters than 4096 elements keep their states.
    model = torch.nn.Sequential(torch.nn.Linear(64, 80), torch.nn.Tanh(), torch.nn.Linear(80, 64))
    inputs = torch.randn(16, 64)
    made = functions(Settings(state=OptimizerState.EIGHT_BIT, step_in_backward=in_backward))
    model, optimizer = made["prepare"](model, torch.optim.AdamW(model.parameters(), lr=0.01))
    values = [made["step"](model, optimizer, mean_loss, (inputs, inputs)).item() for _ in range(10)]

    assert values[-1] < 0.8 * values[0]
    assert optimizer.state[model[0].weight]["state1"].dtype is torch.uint8


def test_shards_take_the_place_of_parameters():
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # GIVEN two processes, of which the other is never asked
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        made = functions(Settings(num_devices=2))
        model, optimizer = made["prepare"](model, optimizer)
        made["step"](model, optimizer, mean_loss, next(make_batches()))
    finally:
        dist.destroy_process_group()

    # THEN the optimizer has state for shards only
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert set(optimizer.state) == set(model.parameters())
    assert optimizer.state[model[0].weight]["exp_avg"].to_local().shape == (4, 6)


def test_only_what_is_used_is_there():
    everything = code_of(Settings(micro_batches=2, checkpoint=BLOCKS, offload=BLOCKS, state=HOST))
    little = code_of(Settings(kernels=SINGLE))

    assert len(everything.splitlines()) > 3 * len(little.splitlines())
    for text in (everything, little):
        imported = [
            name.asname or name.name
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in node.names
        ]
        assert all(text.count(name) > 1 for name in imported)
        assert max(map(len, text.splitlines())) <= 120


def test_many_modules_are_wrapped():
    paths = tuple(f"transformer.h.{index}.attention" for index in range(40))
    text = code_of(Settings(checkpoint=paths))

    assert max(map(len, text.splitlines())) <= 120
    assert all(f'"{path}"' in text for path in paths)


def test_names_stay_text():
    """A module's path, a place in a batch or a subject can't become part of the program."""
    evil = '"); import os; ("\n'
    text = code_of(Settings(checkpoint=(evil,)), subject=evil)
    strings = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]

    assert evil in strings
    assert not any(isinstance(node, ast.Import) and node.names[0].name == "os" for node in ast.walk(ast.parse(text)))
    for place in ("['x'].pop(); import os", "[__import__('os')]", "['a\\']"):
        weighting = dataclasses.replace(COUNT, tensor=place)
        with pytest.raises(BadInput, match="is no place in a batch"):
            code_of(Settings(micro_batches=2, weighting=weighting))


@pytest.mark.parametrize("other", [{"micro_batches": 2}, {"precision": "amp-fp16"}, {"state": HOST}])
def test_what_no_plan_combines_is_refused(other):
    with pytest.raises(BadInput, match="a plan that updates parameters in the backward pass has neither"):
        code_of(Settings(step_in_backward=True, **other))


@pytest.mark.parametrize(
    "settings", [Settings(), Settings(weighting=COUNT), Settings(weighting=Weighting("given"), micro_batch_size=8)]
)
def test_a_step_that_fits_needs_no_program(settings):
    found = dataclasses.replace(make_easy_plan(), settings=settings)

    assert format_code(found) == "# The step fits as it is: nothing has to be changed.\n"

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from memfit.core.errors import BadInput
from memfit.frameworks.torch.apply.recomputation import recompute
from tests.unit.frameworks.torch.apply import architectures
from tests.unit.frameworks.torch.apply.architectures import make


def gradients(model, loss, batch):
    model.zero_grad()
    torch.manual_seed(7)
    value = loss(model, batch)
    value.backward()
    return value.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("build", architectures.ALL)
def test_a_recomputed_step_gives_the_same_bits(build, seed):
    # GIVEN two equal models
    subject = make(build, seed)
    plain, model = subject.copied(), subject.copied()

    # WHEN one of them computes its blocks again
    undo = recompute(model, subject.blocks)
    expected = [gradients(plain, subject.loss, subject.batch) for _ in range(2)]
    found = [gradients(model, subject.loss, subject.batch) for _ in range(2)]
    undo()

    # THEN losses, gradients and buffers are equal, bit by bit
    for (value, grads), (wanted, wanted_grads) in zip(found, expected, strict=True):
        assert torch.equal(value, wanted)
        assert same(grads, wanted_grads)
    assert same(dict(model.named_buffers()), dict(plain.named_buffers()))


def test_blocks_run_again_in_the_backward_pass_only():
    subject = make(architectures.convolutions, 0)
    calls = []
    subject.model[1][0].register_forward_hook(lambda *_: calls.append("inside"))
    subject.model[1].register_forward_hook(lambda *_: calls.append("outside"))

    recompute(subject.model, ["1"])
    value = subject.loss(subject.model, subject.batch)
    assert calls == ["inside", "outside"]
    value.backward()

    assert calls == ["inside", "outside", "inside"]


def test_a_batch_norm_counts_a_batch_once():
    subject = make(architectures.convolutions, 0)
    recompute(subject.model, subject.blocks)
    norm = subject.model[1][1]
    held = dict(norm._buffers)

    gradients(subject.model, subject.loss, subject.batch)

    assert norm.num_batches_tracked == 1
    assert all(norm._buffers[name] is tensor for name, tensor in held.items())


def test_buffers_come_back_when_the_recomputation_fails():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.calls = 0

        def forward(self, data):
            self.calls += 1
            out = self.norm(data).exp()
            if self.calls == 2:
                raise RuntimeError("again")
            return out.sin()

    model = nn.Sequential(nn.Linear(3, 3), Fails())
    recompute(model, ["1"])
    held = dict(model[1].norm._buffers)
    value = model(torch.randn(4, 3)).sum()

    with pytest.raises(RuntimeError, match="again"):
        value.backward()

    assert all(model[1].norm._buffers[name] is tensor for name, tensor in held.items())


def test_a_graph_that_is_kept_is_computed_again_each_time():
    subject = make(architectures.convolutions, 0)
    recompute(subject.model, subject.blocks)
    value = subject.loss(subject.model, subject.batch)

    value.backward(retain_graph=True)
    once = subject.model[0].weight.grad.clone()
    value.backward()

    assert torch.equal(subject.model[0].weight.grad, 2 * once)


def test_without_gradients_the_plain_forward_runs(monkeypatch):
    subject = make(architectures.unet, 0)
    recompute(subject.model, subject.blocks)
    monkeypatch.setattr("memfit.frameworks.torch.apply.recomputation.checkpoint", None)

    with torch.no_grad():
        assert subject.model(subject.batch[0]).shape == (architectures.NUM_SAMPLES, 2, 6, 6)
    with pytest.raises(TypeError):
        subject.model(subject.batch[0])


def test_evaluation_mode_leaves_statistics_alone():
    subject = make(architectures.convolutions, 0)
    plain = subject.copied().eval()
    model = subject.copied().eval()
    recompute(model, subject.blocks)

    found, expected = (gradients(m, subject.loss, subject.batch) for m in (model, plain))

    assert same(found[1], expected[1])
    assert model[1][1].num_batches_tracked == 0


def test_autocast_holds_for_the_second_pass_too():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    plain = copy.deepcopy(model)
    recompute(model, ["1"])
    data = torch.randn(3, 4)

    def loss(m, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m(batch).float().sum()

    assert same(gradients(model, loss, data)[1], gradients(plain, loss, data)[1])


def test_keyword_arguments_may_have_the_names_of_checkpoints():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, data, *, use_reentrant, debug=None):
            return self.inner(data).sin() * use_reentrant + debug

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.named = Named()

        def forward(self, data):
            return self.named(data, use_reentrant=data, debug=2.0)

    model = Outer()
    plain = copy.deepcopy(model)
    recompute(model, ["named"])
    data = torch.randn(4, 3)

    def loss(m, batch):
        return m(batch).sum()

    assert same(gradients(model, loss, data)[1], gradients(plain, loss, data)[1])


def test_the_path_is_told_for_each_recomputation():
    subject = make(architectures.tied, 0)
    told = []

    class Around:
        def __init__(self, path):
            self.path = path

        def __enter__(self):
            told.append(self.path)

        def __exit__(self, *failure):
            pass

    recompute(subject.model, ["block"], Around)
    value = subject.loss(subject.model, subject.batch)
    assert told == []
    value.backward()

    assert told == ["block", "block"]


def test_undoing_leaves_nothing_behind():
    subject = make(architectures.gpt2, 0)
    model = subject.model
    model.transformer.h[0].forward = own = model.transformer.h[0].forward
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}

    undo = recompute(model, subject.blocks)
    assert not model.config.use_cache
    gradients(model, subject.loss, subject.batch)
    undo()

    assert model.config.use_cache
    assert model.transformer.h[0].forward is own
    assert {name: module.__dict__.keys() for name, module in model.named_modules()} == {
        name: attributes.keys() for name, attributes in before.items()
    }


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (["layers.7"], "'layers.7', but _Transformer has no such module.*layers.0, layers.1"),
        (["nothing"], "'nothing', but _Transformer has no such module.*embed, layers, head"),
        ([""], "the whole model"),
        (["head", "head"], "'head' twice"),
        (["layers.0.linear1", "layers.0"], "'layers.0.linear1' is part of 'layers.0'"),
    ],
    ids=str,
)
def test_paths_that_make_no_sense_are_refused(paths, words):
    model = make(architectures.transformer, 0).model
    before = {module: set(module.__dict__) for module in model.modules()}

    with pytest.raises(BadInput, match=words):
        recompute(model, paths)

    assert before == {module: set(module.__dict__) for module in model.modules()}


def test_blocks_may_share_a_part():
    activation = nn.Tanh()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), activation) for _ in range(2)))
    plain = copy.deepcopy(model)
    recompute(model, ["0", "1"])

    def loss(m, batch):
        return m(batch).sum()

    data = torch.randn(2, 3)
    assert same(gradients(model, loss, data)[1], gradients(plain, loss, data)[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_and_scripted_modules_are_refused():
    scripted = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(BadInput, match="TorchScript"):
        recompute(scripted, ["0"])
    compiled = nn.Sequential(torch.compile(nn.Sequential(nn.Linear(2, 2))))
    with pytest.raises(BadInput, match=r"compiled module.*Apply the plan first"):
        recompute(compiled, ["0"])
    with pytest.raises(BadInput, match="compiled module"):
        recompute(compiled, ["0._orig_mod.0"])


def test_a_module_that_changes_its_input_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3)))
    recompute(model, ["1"])

    with pytest.raises(BadInput, match="'1' can't be computed again: it changes one of its inputs in place"):
        model(torch.randn(2, 3))


def test_a_module_that_changes_its_own_buffers_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), spectral_norm(nn.Linear(3, 3)))
    recompute(model, ["1"])

    with pytest.raises(BadInput, match="'1' can't be computed again: it changes its buffer 'parametrizations"):
        model(torch.randn(2, 3))


def test_inputs_are_let_go_by_the_wrapper():
    # GIVEN a recomputed module whose input nobody else holds, and that something else keeps for it
    import weakref

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda kept: kept):
        undo = recompute(model, ("1",))
        hook = model[1].register_forward_pre_hook(
            lambda module, args: seen.append(weakref.ref(args[0].untyped_storage()))
        )
        out = model(torch.randn(2, 4))
    # THEN only what was packed instead is left
    assert seen and seen[0]() is None
    out.sum().backward()
    hook.remove()
    undo()


def test_paths_that_are_refused_leave_the_cache_on():
    class Config:
        use_cache = True

    model = nn.Sequential(nn.Linear(4, 4))
    model.config = Config()
    with pytest.raises(BadInput):
        recompute(model, ("nowhere",))
    assert model.config.use_cache is True


def twins():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    return model, recompute(model, ("1",))


def test_a_copy_of_the_model_runs_its_own_weights():
    # GIVEN a copy of a model whose block is recomputed
    model, undo = twins()
    twin = copy.deepcopy(model)

    # WHEN the copy's weights change
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    out = twin(torch.randn(2, 4))
    out.sum().backward()

    # THEN it computes with them, and its own parameters get the gradients
    assert not out.any()
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in model.parameters())
    undo()
    assert "forward" not in model[1].__dict__


def test_averages_of_weights_are_those_of_the_average():
    model, undo = twins()
    average = torch.optim.swa_utils.AveragedModel(model)
    with torch.no_grad():
        model[1][0].weight.fill_(0)
    inputs = torch.randn(2, 4)
    assert not torch.equal(average(inputs), model(inputs))
    undo()


def test_a_model_is_saved_whole_with_its_plain_forward():
    model, undo = twins()
    loaded = pickle.loads(pickle.dumps(model))
    inputs = torch.randn(2, 4)
    assert torch.equal(loaded(inputs), model(inputs))
    undo()


def test_names_of_arguments_stay():
    class Named(nn.Linear):
        def forward(self, value, *, scale=1.0):
            return super().forward(value) * scale

    model = nn.Sequential(Named(4, 4))
    undo = recompute(model, ("0",))
    assert list(inspect.signature(model[0].forward).parameters) == ["value", "scale"]
    undo()

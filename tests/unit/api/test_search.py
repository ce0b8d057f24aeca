"""`memfit.search` and `memfit.ensemble` on real models."""

import importlib.util

import optuna
import pytest
import torch
from torch import nn

from memfit.api.search import ensemble, search
from memfit.core.errors import BadInput, MissingDependency
from memfit.core.guarding import CannotFit

KEPT = []


def build(width):
    return nn.Sequential(nn.Linear(40, width), nn.Tanh(), nn.Linear(width, 3))


def train(trial):
    width = trial.suggest_categorical("width", [16, 400, 700])
    model = build(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True))
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 40)).square().mean()
        loss.backward()
        optimizer.step()
    if width > 600:
        torch.empty(2**46)
    trial.keep(model)
    return loss


def test_a_search_finds_keeps_and_loads_the_best(tmp_path):
    state = torch.get_rng_state()

    result = search(train, trials=6, folder=tmp_path)

    assert torch.equal(torch.get_rng_state(), state), "the search has drawn from the caller's generator"
    assert {trial.user_attrs["outcome"] for trial in result.trials} == {"finished", "out of memory"}
    assert [trial.user_attrs["held"] for trial in result.trials] == [""] * 6
    model = result.load_best(build(result.best.params["width"]))
    from safetensors.torch import load_file

    kept = load_file(result.best_path)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    with pytest.raises(BadInput, match="is of another model"):
        result.load_best(build(17))


@pytest.mark.slow
def test_an_interrupted_search_ends_with_the_same_numbers(tmp_path):
    def interrupted(trial):
        if trial.number == 1:
            raise KeyboardInterrupt
        return train(trial)

    with pytest.raises(KeyboardInterrupt):
        search(interrupted, trials=3, folder=tmp_path / "a")
    resumed = search(train, trials=3, folder=tmp_path / "a")
    whole = search(train, trials=3, folder=tmp_path / "b")

    assert [trial.value for trial in resumed.trials] == [trial.value for trial in whole.trials]
    assert resumed.best_path.read_bytes() == whole.best_path.read_bytes()


@pytest.mark.usefixtures("every_object_in_sight")
@pytest.mark.parametrize("pruned", [False, True])
def test_a_model_that_is_kept_elsewhere_is_named(tmp_path, pruned):
    def keeps(trial):
        KEPT.append(build(5000))
        if pruned:
            raise optuna.TrialPruned
        return 1

    with pytest.warns(UserWarning, match=r"trial 0 .* its model Sequential is still in memory .* KEPT\[0\]"):
        search(keeps, trials=1, folder=tmp_path)
    KEPT.clear()


def test_a_pruned_trial_leaves_nothing(tmp_path):
    def prunes(trial):
        model = build(5000)
        trial.keep(model)
        trial.report(model(torch.ones(1, 40)).sum().item(), 0)
        raise optuna.TrialPruned

    (trial,) = search(prunes, trials=1, folder=tmp_path).trials

    assert (trial.user_attrs["outcome"], trial.user_attrs["held"]) == ("pruned", "")


def test_without_optuna_one_line_names_it(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "optuna" else find(name))

    with pytest.raises(MissingDependency, match=r"needs Optuna.*`pip install optuna`"):
        search(train, folder=tmp_path / "new")

    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"objective": 5}, "objective must be a function that takes a trial"),
        ({"trials": 0}, "trials must be a whole number from 1 up, but 0"),
        ({"trials": True}, "trials must be a whole number from 1 up, but True"),
        ({"seed": -1}, "seed must be a whole number from 0 up, but -1"),
        ({"seed": "x"}, "seed must be a whole number from 0 up, but 'x'"),
        ({"direction": "up"}, "direction must be 'minimize' or 'maximize', but 'up'"),
        ({"on_error": "ignore"}, "on_error must be 'raise' or 'skip', but 'ignore'"),
    ],
)
def test_bad_arguments_of_a_search(tmp_path, given, message):
    arguments = {"objective": train, "folder": tmp_path / "new", **given}
    with pytest.raises(BadInput) as caught:
        search(**arguments)
    assert message in str(caught.value)
    assert not (tmp_path / "new").exists()


def member(seed):
    def made():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(40, 2000), nn.BatchNorm1d(2000), nn.Dropout(), nn.Linear(2000, 3))

    return made


def batches():
    torch.manual_seed(7)
    return [torch.randn(64, 40), torch.randn(64, 40), torch.randn(5, 40)]


def call(model, batch):
    return model(batch)


def all_at_once(count):
    models = [member(seed)().eval() for seed in range(count)]
    with torch.no_grad():
        return [torch.stack([model(batch) for model in models]) for batch in batches()]


def test_an_ensemble_is_that_of_all_members_at_once():
    members, expected = [member(seed) for seed in range(2)], all_at_once(2)

    stacked = ensemble(members, call, batches(), combine="stack")
    mean = ensemble(members, call, batches())
    precise = ensemble(members, call, batches()[2:], precise=True)

    assert all(torch.equal(one, other) for one, other in zip(stacked, expected, strict=True))
    assert all(torch.allclose(one, other.mean(0), rtol=0, atol=1e-7) for one, other in zip(mean, expected, strict=True))
    assert torch.equal(precise[0], expected[2].double().mean(0).float())


def test_batches_are_split_to_stay_within_a_budget():
    sizes = []

    def predict(model, batch):
        sizes.append(len(batch))
        return model(batch)

    # 383 KiB of parameters and buffers, and 16 KiB for each sample.
    found = ensemble([member(0)], predict, batches(), budget="800KiB", combine="stack")

    # Before them come those of the trace.
    assert sizes[-9:] == [16] * 8 + [5]
    for one, other in zip(found, all_at_once(1), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-5)


def test_a_budget_below_one_sample_is_refused():
    with pytest.raises(CannotFit, match=r"needs .* KiB with one sample at a time, and the budget is 300.0 KiB"):
        ensemble([member(0)], call, batches(), budget="300KiB")


def test_members_from_files(tmp_path):
    def objective(trial):
        trial.keep(build(16))
        return 1

    searched = search(objective, trials=1, folder=tmp_path)
    other = searched.load_best(build(16)).eval()

    (result,) = ensemble([(lambda: build(16), searched.best_path)] * 2, call, batches()[:1])

    with torch.no_grad():
        assert torch.allclose(result, other(batches()[0]), rtol=0, atol=1e-7)
    with pytest.raises(BadInput, match="there is no file"):
        ensemble([(lambda: build(16), tmp_path / "missing")], call, batches())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"members": []}, "members must be a list"),
        ({"members": [nn.Linear(2, 2)]}, "member 0 is a model that is in memory already"),
        ({"predict": None}, "predict must be a function"),
        ({"batches": iter([])}, "batches are read once per member"),
        ({"batches": []}, "there are no batches"),
        ({"budget": "lots"}, "'lots' is not a size"),
        ({"budget": 1.5}, "a budget is a size such as '10GiB'"),
        ({"combine": "median"}, "combine must be one of"),
        ({"batches": torch.utils.data.DataLoader(torch.ones(8, 40), shuffle=True)}, "the loader shuffles"),
    ],
)
def test_bad_arguments_of_an_ensemble(given, message):
    arguments = {"members": [member(0)], "predict": call, "batches": batches(), **given}
    with pytest.raises(BadInput) as caught:
        ensemble(**arguments)
    assert message in str(caught.value)

"""Members one after another; their outputs joined, combined, and checked."""

import weakref

import pytest
import torch
from torch import nn

from memfit.core.errors import BadInput
from memfit.core.guarding import CannotFit
from memfit.frameworks.torch.guard.ensemble import Combined, Ensemble, fingerprint_of, join, structure

KEPT = []
ALIVE = weakref.WeakSet()


@pytest.fixture(autouse=True)
def nothing_alive():
    ALIVE.clear()


class Scaled(nn.Module):
    """A model that multiplies; of those built, at most one is alive."""

    def __init__(self, factor):
        super().__init__()
        assert not ALIVE, "two members are in memory"
        ALIVE.add(self)
        self.factor = factor
        self.weight = nn.Parameter(torch.ones(2**15))

    def forward(self, batch):
        assert not self.training and not torch.is_grad_enabled()
        return batch * self.factor


def run(batches, *, factors=(1, 10), capacity=100, size_within=lambda model, batch: None, passes=None, combine="sum"):
    def predict(model, batch):
        if passes is not None:
            passes.append(len(batch))
        if len(batch) > capacity:
            raise MemoryError("full")
        return model(batch)

    members = [lambda factor=factor: Scaled(factor) for factor in factors]
    return Ensemble(members, predict, batches, Combined(combine), size_within).run()


def numbers(*sizes):
    return [torch.arange(float(size)) for size in sizes]


def combine(how, outputs, precise=False):
    combined = Combined(how, precise)
    for output in outputs:
        combined.add(0, output)
    return combined.finished(0, len(outputs))


def test_results_of_all_members_with_one_alive_at_a_time():
    results = run(numbers(2, 3))

    assert [result.tolist() for result in results] == [[0, 11], [0, 11, 22]]
    assert not ALIVE


def test_batches_are_halved_until_they_fit_and_stay_so():
    passes = []

    results = run(numbers(10, 6), capacity=3, factors=(1,), passes=passes)

    assert [result.tolist() for result in results] == [list(range(10)), list(range(6))]
    # 10, then 5, then 3 (of four parts, larger ones first); the second batch begins with what was found.
    assert passes == [10, 5, 3, 3, 2, 2, 3, 3]


def test_the_size_within_a_budget_is_asked_for_again_only_for_larger_batches():
    asked, passes = [], []

    def size_within(model, batch):
        asked.append(len(batch))
        return min(len(batch), 4)

    run(numbers(3, 2, 8, 9), factors=(1,), size_within=size_within, passes=passes)

    assert asked == [3, 8]
    assert passes == [3, 2, 4, 4, 3, 3, 3]


def test_what_never_fits_is_said():
    with pytest.raises(
        CannotFit, match=r"member 0 of the ensemble runs out of memory with one sample at a time: .*full"
    ):
        run(numbers(2), capacity=0)
    ALIVE.clear()
    with pytest.raises(CannotFit, match="with a batch that can't be split"):
        run([(torch.ones(2), torch.ones(3))], capacity=1)


def test_other_errors_pass():
    with pytest.raises(TypeError):
        run(numbers(2), factors=(None,))


@pytest.mark.usefixtures("every_object_in_sight")
def test_a_member_that_stays_is_said():
    def predict(model, batch):
        KEPT.append(model)
        return batch

    with pytest.warns(UserWarning, match=r"member 0 of the ensemble has been run, but its model Scaled .*KEPT\[0\]"):
        Ensemble([lambda: Scaled(1)], predict, numbers(1), Combined("mean"), lambda model, batch: None).run()
    KEPT.clear()


class Changing:
    def __init__(self, *readings):
        self.readings = list(readings)

    def __iter__(self):
        return iter(self.readings.pop(0))


def test_batches_must_be_the_same_for_every_member():
    one, two, three = torch.tensor([1]), torch.tensor([2]), torch.tensor([3])
    with pytest.raises(BadInput, match=r"batch 1 is another one for member 1 .*shuffle=False"):
        run(Changing([one, two], [one, three]))
    ALIVE.clear()
    with pytest.raises(BadInput, match="member 1 of the ensemble was given 1 batches, and the members before it 2"):
        run(Changing([one, two], [one]))
    ALIVE.clear()
    with pytest.raises(BadInput, match="member 1 of the ensemble was given 2 batches"):
        run(Changing([one], [one, two]))
    ALIVE.clear()
    with pytest.raises(BadInput, match="there are no batches"):
        run([])


@pytest.mark.parametrize("batches", [iter([1]), (batch for batch in [1]), 5])
def test_batches_that_can_be_read_once_are_refused(batches):
    with pytest.raises(BadInput, match=r"batches are read once per member, which .* doesn't allow"):
        run(batches)


def test_a_loader_that_shuffles_is_refused():
    with pytest.raises(BadInput, match="the loader shuffles"):
        run(torch.utils.data.DataLoader(torch.ones(4), shuffle=True))
    assert len(run(torch.utils.data.DataLoader(torch.ones(4)))) == 4


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([], "members must be a list of functions"),
        (5, "members must be a list of functions"),
        ("name", "members must be a list of functions"),
        ([5], "member 0 must be a function that builds a model, or a pair"),
        ([len, (5, "file")], "member 1 must be a function that builds a model, or a pair"),
        ([len, nn.ReLU()], "member 1 is a model that is in memory already"),
        ([(nn.ReLU(), "file")], "member 0 is a model that is in memory already"),
        ([(nn.ReLU, "missing")], "there is no file 'missing'"),
        ([lambda: 5], "member 0 of the ensemble is built as int, not as a torch.nn.Module"),
    ],
)
def test_members_that_are_none_are_refused(members, message):
    with pytest.raises(BadInput) as caught:
        Ensemble(members, len, numbers(1), Combined("mean"), lambda model, batch: None).run()
    assert message in str(caught.value)


def test_outputs_must_be_tensors():
    with pytest.raises(BadInput, match="predict must return tensors, but it returned float"):
        Ensemble([nn.ReLU], lambda *_: 0.5, numbers(1), Combined("mean"), lambda model, batch: None).run()


def test_parts_are_joined_in_their_nesting():
    x, y = torch.arange(7.0), torch.arange(14).view(7, 2)

    joined = join([(x[:4], {"y": y[:4]}), (x[4:], {"y": y[4:]})], [4, 3])

    assert torch.equal(joined[0], x)
    assert torch.equal(joined[1]["y"], y)


@pytest.mark.parametrize("output", [lambda x: x.sum(), lambda x: x[:1]])
def test_outputs_without_a_row_per_sample_are_not_joined(output):
    with pytest.raises(BadInput, match="so that outputs of parts of a batch can't be joined"):
        join([output(torch.ones(3)), output(torch.ones(2))], [3, 2])


def test_mean_and_sum_are_those_of_the_stack_to_rounding():
    torch.manual_seed(0)
    outputs = [torch.randn(50, 3) for _ in range(7)]
    stacked = torch.stack(outputs)

    assert torch.allclose(combine("mean", outputs), stacked.mean(0), rtol=0, atol=3e-7)
    assert torch.allclose(combine("sum", outputs), stacked.sum(0), rtol=0, atol=2e-6)
    # Added in float64 and rounded once.
    assert torch.equal(combine("mean", outputs, precise=True), stacked.double().mean(0).float())


def test_half_precision_is_added_in_float32():
    outputs = [torch.full((2,), 1.0, dtype=torch.bfloat16)] * 300

    found = combine("mean", outputs)

    # In bfloat16 itself 256 + 1 is 256.
    assert (found.dtype, found.tolist()) == (torch.bfloat16, [1.0, 1.0])


def test_whole_numbers_have_a_mean_and_a_sum():
    outputs = [torch.tensor([1, 2]), torch.tensor([2, 4])]

    assert combine("mean", outputs).tolist() == [1.5, 3.0]
    assert combine("sum", outputs).tolist() == [3, 6]
    assert combine("sum", [torch.tensor([True]), torch.tensor([True])]).tolist() == [2]


def test_the_first_output_is_not_written_to():
    first = torch.ones(2)

    combine("sum", [first, torch.ones(2)])

    assert first.tolist() == [1, 1]


def test_stack_is_exact_and_a_function_gets_it():
    outputs = [(torch.randn(3), torch.randn(2)) for _ in range(4)]

    stacked = combine("stack", outputs)

    assert torch.equal(stacked[0], torch.stack([a for a, _ in outputs]))
    assert torch.equal(combine(lambda s: s[1].amax(0), outputs), stacked[1].amax(0))


def test_votes_of_labels_and_of_scores():
    labels = [torch.tensor(values) for values in ([3, 1, 5], [3, 2, 4], [0, 2, 5], [7, 1, 4])]
    # Two against one and one; ties go to the smallest.
    assert combine("vote", labels).tolist() == [3, 1, 4]
    scores = [nn.functional.one_hot(found, 8).float() for found in labels]
    assert combine("vote", scores).tolist() == [3, 1, 4]
    with pytest.raises(BadInput, match="for combine='vote' predict must return labels"):
        combine("vote", [torch.ones(3)])


@pytest.mark.parametrize("how", ["mean", "stack"])
def test_outputs_that_do_not_go_together_are_refused(how):
    with pytest.raises(BadInput, match=r"batch 0 have the shapes \(2,\) and \(3,\) at \['a'\], and can't be combined"):
        combine(how, [{"a": torch.ones(2)}, {"a": torch.ones(3)}])
    with pytest.raises(BadInput, match=r"have the shapes \(2,\) and None"):
        combine(how, [{"a": torch.ones(2)}, {"b": torch.ones(2)}])


def test_an_unknown_combination_is_refused():
    with pytest.raises(BadInput, match="combine must be one of mean, sum, vote, stack or a function, but 'median'"):
        Combined("median")


def test_batches_are_told_apart_by_values_and_shapes():
    one = {"x": torch.arange(1000.0), "y": torch.tensor([float("nan")])}
    other = {**one, "x": one["x"].flip(0)}

    assert fingerprint_of(one) == fingerprint_of({name: value.clone() for name, value in one.items()})
    assert fingerprint_of(one) != fingerprint_of(other)
    assert fingerprint_of(one["x"]) != fingerprint_of(one["x"].view(2, 500))


def test_models_that_are_built_alike_are_told():
    assert structure(nn.Linear(2, 3)) == structure(nn.Linear(2, 3))
    assert structure(nn.Linear(2, 3)) != structure(nn.Linear(2, 3).double())
    assert structure(nn.Sequential(nn.ReLU())) != structure(nn.Sequential(nn.GELU()))

"""Members one after another, with a framework whose models are functions and whose batches are lists."""

import pytest

from memfit.core.errors import BadInput
from memfit.core.guarding import CannotFit, OutOfMemory, Where
from memfit.guard.ensemble import Sequence, as_members, readable_again


class Lists:
    """A framework; `alive` counts models."""

    def __init__(self):
        self.alive, self.most, self.left = 0, 0, ""

    def recognise(self, error):
        return OutOfMemory(Where.HOST, "python", text="full") if isinstance(error, MemoryError) else None

    def clear_frames(self, error):
        error.__traceback__ = None

    def release(self):
        pass

    def watch(self):
        return lambda: self.left

    def predict(self, predict, model, batch):
        return predict(model, batch)

    def batch_size(self, batch):
        return len(batch) if isinstance(batch, list) else None

    def split(self, batch, count):
        sizes = [len(batch) // count + (index < len(batch) % count) for index in range(count)]
        starts = [sum(sizes[:index]) for index in range(count)]
        return [batch[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def join(self, outputs, sizes):
        assert [len(output) for output in outputs] == sizes
        return [value for output in outputs for value in output]

    def fingerprint(self, batch):
        return tuple(batch)


class Sums:
    def __init__(self):
        self.outputs = []

    def add(self, index, output):
        if index == len(self.outputs):
            self.outputs.append([])
        self.outputs[index].append(output)

    def finished(self, index, num_members):
        assert len(self.outputs[index]) == num_members
        return [sum(values) for values in zip(*self.outputs[index], strict=True)]


class Model:
    def __init__(self, lists, factor):
        self.lists, self.factor = lists, factor
        lists.alive += 1
        lists.most = max(lists.most, lists.alive)

    def __del__(self):
        self.lists.alive -= 1


def run(batches, *, factors=(1, 10), capacity=100, size_within=lambda model, batch: None, lists=None, passes=None):
    lists = lists or Lists()

    def predict(model, batch):
        if passes is not None:
            passes.append(len(batch))
        if len(batch) > capacity:
            raise MemoryError
        return [value * model.factor for value in batch]

    builders = [lambda factor=factor: Model(lists, factor) for factor in factors]
    members = as_members(builders, lambda build, file: build, lambda value: False)
    said = []
    sequence = Sequence(members, predict, readable_again(batches), lists, Sums(), size_within, said.append)
    return sequence.run(), lists, said


def test_results_of_all_members_with_one_alive_at_a_time():
    found, lists, said = run([[1, 2], [3]])

    assert found == [[11, 22], [33]]
    assert (lists.most, lists.alive, said) == (1, 0, [])


def test_batches_are_halved_until_they_fit_and_stay_so():
    passes = []

    found, _, _ = run([list(range(10)), list(range(6))], capacity=3, factors=(1,), passes=passes)

    assert found == [list(range(10)), list(range(6))]
    # 10, then 5, then 3 (of four parts, larger ones first); the second batch begins with what was found.
    assert passes == [10, 5, 3, 3, 2, 2, 3, 3]


def test_the_size_within_a_budget_is_asked_for_again_only_for_larger_batches():
    asked = []

    def size_within(model, batch):
        asked.append(len(batch))
        return min(len(batch), 4)

    passes = []
    run([[1] * 3, [1] * 2, [1] * 8, [1] * 9], factors=(1,), size_within=size_within, passes=passes)

    assert asked == [3, 8]
    assert passes == [3, 2, 4, 4, 3, 3, 3]


def test_what_never_fits_is_said():
    with pytest.raises(CannotFit, match=r"member 0 of the ensemble runs out of memory with one sample at a time: full"):
        run([[1, 2]], capacity=0)
    with pytest.raises(CannotFit, match="with a batch that can't be split"):
        run([(1, 2)], capacity=1)


def test_other_errors_pass():
    with pytest.raises(TypeError):
        run([["text", None]], factors=(1.5,))


def test_a_member_that_stays_is_said():
    lists = Lists()
    lists.left = "its model is still in memory"

    _, _, said = run([[1]], lists=lists, factors=(1,))

    assert said == ["member 0 of the ensemble has been run, but its model is still in memory"]


class Changing:
    def __init__(self, *readings):
        self.readings = list(readings)

    def __iter__(self):
        return iter(self.readings.pop(0))


def test_batches_must_be_the_same_for_every_member():
    with pytest.raises(BadInput, match=r"batch 1 is another one for member 1 .*shuffle=False"):
        run(Changing([[1], [2]], [[1], [3]]))
    with pytest.raises(BadInput, match="member 1 of the ensemble was given 1 batches, and the members before it 2"):
        run(Changing([[1], [2]], [[1]]))
    with pytest.raises(BadInput, match="member 1 of the ensemble was given 2 batches"):
        run(Changing([[1]], [[1], [2]]))
    with pytest.raises(BadInput, match="there are no batches"):
        run([])


@pytest.mark.parametrize("batches", [iter([1]), (batch for batch in [1]), 5])
def test_batches_that_can_be_read_once_are_refused(batches):
    with pytest.raises(BadInput, match=r"batches are read once per member, which .* doesn't allow"):
        readable_again(batches)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "members must be a list of functions"),
        (5, "members must be a list of functions"),
        ("name", "members must be a list of functions"),
        ([5], "member 0 must be a function that builds a model, or a pair"),
        ([len, (5, "file")], "member 1 must be a function that builds a model, or a pair"),
        ([len, b"model"], "member 1 is a model that is in memory already"),
        ([(b"model", "file")], "member 0 is a model that is in memory already"),
    ],
)
def test_members_that_are_none_are_refused(given, message):
    with pytest.raises(BadInput) as caught:
        as_members(given, lambda build, file: build, lambda value: isinstance(value, bytes))
    assert message in str(caught.value)


def test_pairs_are_built_and_loaded():
    (member,) = as_members([(list, "file")], lambda build, file: lambda: [*build(), file], lambda value: False)

    assert (member.build(), member.name) == (["file"], "member 0 (file)")

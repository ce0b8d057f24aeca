"""The best parameters are kept on disk or in host memory, and the model isn't."""

import math

import pytest

from memfit.core.errors import BadInput
from memfit.core.guarding import BadCheckpoint
from memfit.guard.checkpointing import Best
from memfit.guard.checkpoints import Folder


class Plain:
    """A model of one number; counts the copies that are made of it."""

    def __init__(self):
        self.value = 0
        self.reused = 0

    def write(self, directory):
        (directory / "value").write_text(str(self.value))

    def read(self, directory, model=None):
        (model or self).value = int((directory / "value").read_text())

    def copy(self, into=None):
        self.reused += into is not None
        return [self.value]

    def put(self, copies, model=None):
        (model or self).value = copies[0]


@pytest.fixture(params=["disk", "memory"])
def make(request, tmp_path):
    steps = iter(range(1000))

    def make(model):
        folder = Folder(tmp_path / "best", keep=1) if request.param == "disk" else None
        return Best(model, lambda: next(steps), folder)

    return make


def offer_all(best, model, scores, **options):
    kept = []
    for value, score in enumerate(scores):
        model.value = value
        kept.append(best.offer(score, **options))
    return kept


@pytest.mark.parametrize(
    ("higher", "scores", "kept", "value"),
    [
        (True, [0.1, 0.3, 0.3, 0.2, 0.4], [True, True, False, False, True], 4),
        (False, [3.0, 2.0, 5.0, math.nan, 2.0], [True, True, False, False, False], 1),
        (True, [math.nan, -math.inf, 1], [False, True, True], 2),
        (False, [1.0, -math.inf], [True, True], 1),
    ],
)
def test_the_best_is_kept(make, higher, scores, kept, value):
    model = Plain()
    best = make(model)
    assert (best.score, best.step) == (None, None)

    assert offer_all(best, model, scores, higher_is_better=higher) == kept
    assert best.score == scores[value]

    # The run's own model gets them back, or any other.
    model.value = 99
    other = Plain()
    best.load_into(other)
    assert (model.value, other.value) == (99, value)
    best.load_into()
    assert model.value == value


def test_the_step_is_that_of_the_best(make):
    model = Plain()
    best = make(model)
    offer_all(best, model, [1, 3, 2], higher_is_better=True)

    assert best.step == 1


def test_memory_is_used_again():
    model = Plain()
    best = Best(model, lambda: 0)
    offer_all(best, model, [1, 2, 3], higher_is_better=True)

    assert model.reused == 2


def test_nothing_to_load_is_refused(make):
    with pytest.raises(BadInput, match="there are no best parameters yet"):
        make(Plain()).load_into()


def test_the_other_direction_is_refused(make):
    best = make(Plain())
    best.offer(1, higher_is_better=True)

    with pytest.raises(BadInput, match="higher_is_better=False was given"):
        best.offer(1, higher_is_better=False)


def test_a_resumed_run_knows_the_best_so_far(tmp_path):
    # GIVEN a run that died
    model = Plain()
    steps = iter((40, 80))
    best = Best(model, lambda: next(steps), Folder(tmp_path, keep=1))
    offer_all(best, model, [2.5, 1.5], higher_is_better=False)
    best.close()

    # WHEN it goes on from a checkpoint before its best
    resumed = Best(Plain(), lambda: 60, Folder(tmp_path, keep=1))

    # THEN only a better one replaces it, though its step is lower
    assert (resumed.score, resumed.step) == (1.5, 80)
    assert not resumed.offer(1.7, higher_is_better=False)
    assert resumed.offer(1.2, higher_is_better=False)
    assert Best(Plain(), lambda: 0, Folder(tmp_path, keep=1)).step == 60
    with pytest.raises(BadInput):
        resumed.offer(1, higher_is_better=True)


def test_a_full_disk_keeps_the_one_before(tmp_path, caplog):
    model = Plain()
    best = Best(model, lambda: 3, Folder(tmp_path, keep=1))
    model.value = 7
    best.offer(1, higher_is_better=True)

    def full(directory):
        raise OSError(28, "No space left on device")

    model.write = full

    assert not best.offer(2, higher_is_better=True)
    assert "the disk is full" in caplog.messages[0]
    assert best.score == 1
    best.load_into()
    assert model.value == 7


def test_a_folder_of_something_else_is_refused(tmp_path):
    folder = Folder(tmp_path)
    folder.write(1, lambda directory: (directory / "a").write_text("a"))

    with pytest.raises(BadCheckpoint, match="its manifest names no score"):
        Best(Plain(), lambda: 0, folder)


def test_files_that_are_gone_are_told(tmp_path):
    best = Best(Plain(), lambda: 5, Folder(tmp_path))
    best.offer(1, higher_is_better=True)
    (tmp_path / "step-000000005" / "value").unlink()

    with pytest.raises(BadCheckpoint, match="the best parameters, of step 5, are gone"):
        best.load_into()

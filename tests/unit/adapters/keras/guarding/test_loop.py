"""A fit as a guard sees it."""

import pytest

keras = pytest.importorskip("keras")
from memfit.adapters.keras.guarding.loop import KerasLoop  # noqa: E402
from memfit.core.errors import BadModel  # noqa: E402
from memfit.core.guarding import BadCheckpoint, BatchSize  # noqa: E402
from memfit.core.settings import Settings  # noqa: E402
from tests.unit.adapters.keras.guarding.models import build, data  # noqa: E402


def looped(model, **options):
    model._symbolic_build(data_batch=data())
    model.make_train_function()
    given = {"approximate": False, "is_ordered": False} | options
    return KerasLoop(model, None, [], lambda batch: None, **given)


def test_settings_are_put_on_and_taken_off():
    model = build(keras.layers.Dense(3))
    loop = looped(model)
    loop.put_on(Settings(micro_batches=4, micro_batch_size=3))
    assert "train_step" in model.__dict__
    assert loop.settings.micro_batch_size == 3
    assert loop.why_not_split() == ""
    before = model.train_function
    loop.put_on(Settings(micro_batches=2, micro_batch_size=3))
    assert model.train_function is before
    loop.close()

    assert "train_step" not in model.__dict__


def test_what_a_model_can_not_have_is_said():
    loop = looped(build())

    assert "statistics of each batch" in loop.why_not_split()
    assert loop.mixes_samples
    with pytest.raises(BadModel, match="statistics of each batch"):
        loop.put_on(Settings(micro_batches=2, micro_batch_size=3))
    assert loop.settings == Settings()


def test_sizes_of_batches():
    loop = looped(build())
    x, y = data()

    assert loop.size_of((x, y)) == BatchSize(12)
    assert loop.size_of((x, y[:5])) == BatchSize(None)


def test_progress_comes_back(tmp_path):
    model = build()
    loop = looped(model)
    loop.watch_callbacks()
    progress = {"update": 7, "epoch": 3, "batch": 1, "stopped": False, "attempts": None, "history": {}, "epochs": []}
    progress["data"] = loop.data.position(at_end=False)
    loop.write(tmp_path, progress)

    assert loop.read(tmp_path).progress["epoch"] == 3
    loop.write(tmp_path, {**progress, "batch": "x"})
    with pytest.raises(BadCheckpoint, match="batch is 'x', and int was expected"):
        loop.read(tmp_path)


def test_what_is_no_model_is_refused():
    with pytest.raises(BadModel, match=r"a compiled keras\.Model was expected, but int was given"):
        KerasLoop(3, None, [], len, approximate=False, is_ordered=False)
    plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(BadModel, match="isn't compiled"):
        KerasLoop(plain, None, [], len, approximate=False, is_ordered=False)

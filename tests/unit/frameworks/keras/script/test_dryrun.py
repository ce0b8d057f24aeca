"""A `fit` that ends with its first batch; told with a package that looks like Keras."""

from types import SimpleNamespace

import pytest

from memfit.frameworks.keras.script.dryrun import FirstBatch, end_at_fit


class Model:
    train_function = None
    num_trained = 0

    def make_train_function(self, force=False):
        def train(state, iterator):
            self.num_trained += 1

        self.train_function = train

    def fit(self, batches):
        self.make_train_function()
        iterator = iter(batches)
        try:
            for _ in batches:
                self.train_function("state", iterator)
        except Exception:
            return "caught"
        return "through"


def test_fit_ends_with_its_first_batch_and_trains_nothing():
    class Own(Model):
        pass

    Own.fit = Model.fit
    found = []
    end_at_fit(SimpleNamespace(Model=Own), found.append)
    model = Own()

    with pytest.raises(FirstBatch) as ended:
        model.fit([("x", "y"), ("a", "b")])

    assert found == [ended.value]
    assert (ended.value.model, ended.value.batch) == (model, ("x", "y"))
    assert model.num_trained == 0
    assert "make_train_function" not in vars(model)
    assert model.train_function is None


def test_no_handler_of_exceptions_holds_it_back():
    assert not issubclass(FirstBatch, Exception)

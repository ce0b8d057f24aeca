from types import ModuleType, SimpleNamespace

import torch

from memfit.adapters.torch.keras_optimizers import state_of, update_replacements
from memfit.adapters.torch.replacement import replaced


def make_module():
    """Keras's module of optimizers, as far as it is used here."""

    class BaseOptimizer:
        def apply(self, grads, trainable_variables=None):
            return self, grads, trainable_variables

    module = ModuleType("optimizers")
    module.BaseOptimizer = BaseOptimizer
    return module


def test_updates_are_heard_of_before_and_after():
    module, heard = make_module(), []
    optimizer = type("Adam", (module.BaseOptimizer,), {})()
    given = update_replacements(module, lambda o: heard.append(("begin", o)), lambda o: heard.append(("end", o)))
    with replaced(given):
        assert optimizer.apply([1], [2]) == (optimizer, [1], [2])
        assert optimizer.apply([1]) == (optimizer, [1], None)
        assert optimizer.apply(grads=[1], trainable_variables=[2]) == (optimizer, [1], [2])

    assert heard == [("begin", optimizer), ("end", optimizer)] * 3


def test_asking_changes_nothing_and_afterwards_nothing_is_heard():
    module, heard = make_module(), []
    plain = module.BaseOptimizer.apply
    given = update_replacements(module, heard.append, heard.append)
    assert module.BaseOptimizer.apply is plain
    with replaced(given):
        assert module.BaseOptimizer.apply is not plain

    assert module.BaseOptimizer.apply is plain
    module.BaseOptimizer().apply([1])
    assert heard == []


def test_the_tensors_of_an_optimizer():
    tensors = [torch.zeros(2), torch.zeros(3)]
    optimizer = SimpleNamespace(variables=[SimpleNamespace(value=tensor) for tensor in tensors])

    assert state_of(optimizer) == tensors

import pytest

from memfit import integrations
from memfit.api import integrations as implemented


def test_the_public_names_are_those_that_work():
    assert integrations.guard_trainer is implemented.guard_trainer
    assert integrations.GuardedTrainerMixin is implemented.GuardedTrainerMixin
    assert integrations.LightningGuard.__mro__[1:] == implemented.LightningGuard.__mro__[1:]


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'KerasGuard'"):
        _ = integrations.KerasGuard

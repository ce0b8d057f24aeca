"""How long the operators of a step take: below planner and estimator, which both ask."""

from memfit.timing.rates import Rates as Rates
from memfit.timing.rates import rates_of as rates_of
from memfit.timing.step import step_time as step_time

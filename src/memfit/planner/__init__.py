"""What could be changed about a step so that it needs less memory, and what each change would save."""

from memfit.planner.advice import advise

__all__ = ["advise"]

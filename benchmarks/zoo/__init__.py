"""Small but structurally real models of every kind, with a batch and a loss each, in the ordered dict `CASES`.

Nothing is downloaded: all models come from code or a configuration. Sizes are chosen so that a training step takes at
most a few seconds on two cores, and the peak of most lies between 50 MB and 1 GB.
"""

from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators

define_missing_operators()

from benchmarks.zoo import dense, language, patterns, recurrent, routing, vision  # noqa: E402, F401
from benchmarks.zoo.case import CASES, Case  # noqa: E402

__all__ = ["CASES", "Case"]

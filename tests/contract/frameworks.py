"""The frameworks that the contract is for, and what each needs; none of them is imported here."""

import importlib
import os
from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True)
class Framework:
    """One column of the contract.

    Args:
        module: of the case, under `tests.contract`.
        case: name of its class.
        packages: that must be installed.
        keras_backend: of the process in which its cases are run; Keras has one in each.
        named_jobs: names of jobs, each with the package that has its model.
    """

    module: str
    case: str
    packages: tuple[str, ...]
    keras_backend: str
    named_jobs: tuple[tuple[str, str], ...] = ()

    @property
    def missing(self) -> list[str]:
        """Packages that aren't installed."""
        return [name for name in self.packages if find_spec(name) is None]

    @property
    def is_of_this_process(self) -> bool:
        """Whether its cases are run here, and not in a process of their own."""
        return self.keras_backend == os.environ["KERAS_BACKEND"]

    def load_case(self) -> type:
        """The class of its case, which loads the framework."""
        found: type = getattr(importlib.import_module(f"tests.contract.{self.module}"), self.case)
        return found


_KERAS_JOBS = (("keras:VGG16", "keras"),)
_TORCH_JOBS = (
    ("torchvision:alexnet", "torchvision"),
    ("timm:resnet10t", "timm"),
    ("hf:GPT2LMHeadModel", "transformers"),
)

FRAMEWORKS = {
    "torch": Framework("torch_case", "TorchCase", ("torch",), "torch", _TORCH_JOBS),
    "jax": Framework("jax_case", "JaxCase", ("jax", "optax"), "jax"),
    **{
        f"keras-{backend}": Framework("keras_case", "KerasCase", ("keras", backend), backend, _KERAS_JOBS)
        for backend in ("torch", "jax", "tensorflow")
    },
}

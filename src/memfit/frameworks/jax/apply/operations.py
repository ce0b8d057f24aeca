"""How much a traced function of JAX computes: multiplications and additions of its products and convolutions."""

import math
from typing import Any


def count_flops(program: Any) -> float:
    """Floating-point operations of a jaxpr, those of its inner programs included; a loop counts with its length.

    A loop whose length only a run would tell counts once.
    """
    total = 0.0
    for equation in program.eqns:
        name = equation.primitive.name
        if name == "dot_general":
            total += _product(equation)
        elif name == "conv_general_dilated":
            total += _convolution(equation)
        else:
            times = equation.params.get("length", 1) if name == "scan" else 1
            total += times * sum(map(count_flops, _inner(equation.params)))
    return total


def _product(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    size = math.prod(equation.outvars[0].aval.shape) * math.prod(left[place] for place in contracted)
    return 2.0 * float(size)


def _convolution(equation: Any) -> float:
    kernel = equation.invars[1].aval.shape
    output_channels = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    size = math.prod(equation.outvars[0].aval.shape) * math.prod(kernel)
    return float(2.0 * size / max(1, output_channels))


def _inner(params: dict[str, Any]) -> list[Any]:
    """Programs among the parameters of an equation; of branches, the first that there is."""
    found = []
    for value in params.values():
        one = value[0] if isinstance(value, tuple | list) and value else value
        program = getattr(one, "jaxpr", one)
        if hasattr(program, "eqns"):
            found.append(program)
    return found

"""Predicted against measured peaks of training steps of JAX on the CPU.

    python -m benchmarks.jax_accuracy

How the truth is measured: benchmarks/measuring_jax.py.
"""

import sys

from benchmarks.jax_steps import CASES
from benchmarks.measuring_jax import measure
from benchmarks.reporting import Bar, percent, publish, table
from memfit.core.units import MIB

LIMIT = 0.10


def main() -> int:
    """Measures all steps and publishes."""
    rows, errors = [], {}
    for name in CASES:
        found = measure(f"benchmarks.jax_steps:{name}")
        errors[name] = found["predicted"] / found["measured"] - 1
        sizes = (f"{found['measured'] / MIB:,.1f}", f"{found['predicted'] / MIB:,.1f}")
        rows.append((name, *sizes, percent(errors[name])))
        print(" | ".join(rows[-1]), flush=True)
    worst = max(errors, key=lambda name: abs(errors[name]))
    measured, met = f"{abs(errors[worst]):.2%} ({worst})", abs(errors[worst]) <= LIMIT
    bars = [Bar(f"greatest error of {len(errors)} steps", measured, f"at most {LIMIT:.0%}", met)]
    head = ("step", "measured, MiB", "predicted, MiB", "error")
    publish("jax_accuracy", "JAX: predicted against measured memory", bars, [table(head, rows)], save=True)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
